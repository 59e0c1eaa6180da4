"""One target of the dispatcher's: its replica, its circuit and its rounds, and what it may be given.

Knows nothing of the other targets, nor of the queue.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.background import Background
from coordinator.placement.guarded_target import GuardedTarget
from coordinator.protocols import RemoteTarget
from coordinator.replicas.replica import Replica
from coordinator.requests.generation import Generation
from coordinator.rounds.scheduler import Scheduler
from paceline.errors import PacelineError
from paceline.types import CircuitState, ModelDescription, ReplicaDescription


@dataclass(frozen=True)
class Serving:
    """What serves with a replica that was up once."""

    guard: GuardedTarget
    scheduler: Scheduler


class Target:
    def __init__(self, replica: Replica[RemoteTarget], make: Callable[[], Serving], tasks: Background) -> None:
        """`make` is called when it is up for the first time, and again when it comes back as another."""
        self.replica = replica
        self._make = make
        self._tasks = tasks
        self._serving: Serving | None = None
        self._made_for: ModelDescription | None = None
        self._rounds: asyncio.Task[PacelineError] | None = None
        self._is_stopping = False
        """Its rounds were cancelled, and its generations are about to move."""

    @property
    def is_running(self) -> bool:
        return self._rounds is not None

    @property
    def is_usable(self) -> bool:
        """Whether it serves, or would be given something to see whether it does."""
        return self._takes_sequences and self._circuit_state is not CircuitState.OPEN or self._may_be_tried

    @property
    def is_healthy(self) -> bool:
        return self._takes_sequences and self._circuit_state is CircuitState.CLOSED

    @property
    def room(self) -> int:
        """How many generations it can be given now. One whose circuit was open gets one, to see."""
        if self._serving is None or not self._takes_sequences:
            return 0
        if self._circuit_state is CircuitState.CLOSED:
            return self._serving.scheduler.pool.free_count
        return int(self._may_be_tried)

    @property
    def is_on_trial(self) -> bool:
        """Whether what it is given next is to show that it works."""
        return self._circuit_state is not CircuitState.CLOSED

    @property
    def generations(self) -> list[Generation]:
        return self._serving.scheduler.pool.generations if self._serving else []

    @property
    def live_count(self) -> int:
        return self._serving.scheduler.pool.live_count if self._serving else 0

    @property
    def waiting_count(self) -> int:
        return self._serving.scheduler.pool.waiting_count if self._serving else 0

    @property
    def unread_count(self) -> int:
        return self._serving.scheduler.pool.unread_count if self._serving else 0

    @property
    def load(self) -> tuple[int, float]:
        """Generations it is to serve, then how full its cache is."""
        return self.live_count + self.waiting_count, self.replica.kv_use

    def describe(self) -> ReplicaDescription:
        return ReplicaDescription(
            self.replica.address, self.replica.state, self.live_count + self.waiting_count, self._circuit_state
        )

    def start(self, on_end: "Callable[[Target, asyncio.Task[PacelineError]], None]") -> None:
        """Run rounds, until it is stopped or given up."""
        assert self.replica.description
        model = self.replica.description.lasting
        # One that only restarted keeps its circuit: it may be what ends it again and again.
        if self._serving is None or self._made_for != model:
            self._serving, self._made_for = self._make(), model
        self._rounds = self._tasks.start(self._serving.scheduler.run())
        self._rounds.add_done_callback(lambda rounds: on_end(self, rounds))

    def give(self, generations: list[Generation]) -> None:
        assert self._serving
        if self.is_on_trial:
            self._serving.guard.circuit.allows()
        self._serving.scheduler.pool.adopt(generations)

    def retire(self, generations: list[Generation]) -> None:
        """Drop those of the generations that are here and ended."""
        if self._serving:
            self._serving.scheduler.retire(generations)
            if self._circuit_state is CircuitState.HALF_OPEN and not self.live_count:
                self._serving.guard.circuit.gave_up()  # what was to show whether it works is gone

    def ended(self) -> list[Generation]:
        """Its rounds are over: hand over its generations."""
        assert self._serving
        self._rounds, self._is_stopping = None, False
        return self._serving.scheduler.give_up()

    def stop(self) -> None:
        if self._rounds and not self._is_stopping:
            self._is_stopping = True
            self._rounds.cancel()

    async def stopped(self) -> None:
        if self._rounds:
            await asyncio.gather(self._rounds, return_exceptions=True)

    @property
    def _takes_sequences(self) -> bool:
        return self.replica.is_up and self._rounds is not None and not self._is_stopping

    @property
    def _circuit_state(self) -> CircuitState:
        return self._serving.guard.circuit.state if self._serving else CircuitState.CLOSED

    @property
    def _may_be_tried(self) -> bool:
        return (
            self._takes_sequences
            and self._serving is not None
            and self._circuit_state is CircuitState.OPEN
            and self._serving.guard.circuit.would_allow
        )
