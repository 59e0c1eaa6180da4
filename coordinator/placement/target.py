"""One target of the dispatcher: its replica, its circuit, its rounds, and the number of generations it may be given.

Knows nothing of the other targets or of the queue.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.background import Background
from coordinator.placement.guarded_target import GuardedTarget
from coordinator.protocols import RemoteTarget
from coordinator.replicas.replica import Replica
from coordinator.replicas.stickiness import SentBeginnings, SentTo
from coordinator.requests.generation import Generation
from coordinator.rounds.scheduler import Scheduler
from paceline.errors import PacelineError
from paceline.types import CircuitState, ModelDescription, ReplicaDescription


@dataclass(frozen=True)
class Serving:
    """The parts that serve with a replica. They are made when it is up for the first time."""

    guard: GuardedTarget
    scheduler: Scheduler


class Target:
    def __init__(self, replica: Replica[RemoteTarget], make: Callable[[], Serving], tasks: Background) -> None:
        """`make` is called when the replica is up for the first time, and again when it comes back as another model."""
        self.replica = replica
        self._sent = SentTo()
        self._make = make
        self._tasks = tasks
        self._serving: Serving | None = None
        self._made_for: ModelDescription | None = None
        self._rounds: asyncio.Task[PacelineError] | None = None
        self._is_stopping = False
        """Whether its rounds were cancelled, so that its generations are about to move."""

    @property
    def address(self) -> str:
        return self.replica.address

    @property
    def sent(self) -> SentBeginnings | None:
        return self._sent.beginnings(self.replica.description)

    @property
    def is_running(self) -> bool:
        return self._rounds is not None

    @property
    def is_usable(self) -> bool:
        """Whether it serves, or may be tried."""
        return self._takes_generations and self._circuit_state is not CircuitState.OPEN or self.may_be_tried

    @property
    def is_healthy(self) -> bool:
        return self._takes_generations and self._circuit_state is CircuitState.CLOSED

    @property
    def is_left(self) -> bool:
        """Whether it was seen to fit and is to serve, or has generations that may end here.

        One that no name leads to is not to serve: it may be a pod that was taken out of its service for a closer look.
        """
        return self.replica.fits and (self.replica.is_named or bool(self.generations))

    @property
    def room(self) -> int:
        """Generations it can be given now; 1 if its circuit was open and it may be tried."""
        if self._serving is None or not self._takes_generations:
            return 0
        if self._circuit_state is CircuitState.CLOSED:
            return self._serving.scheduler.pool.free_count
        return int(self.may_be_tried)

    @property
    def is_on_trial(self) -> bool:
        """Whether its next generation is a trial of whether it works."""
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
        """Count of its generations, then the used share of its cache."""
        return self.live_count + self.waiting_count, self.replica.kv_use

    def describe(self) -> ReplicaDescription:
        return self.replica.described(self.live_count + self.waiting_count, self._circuit_state)

    def start(self, on_end: "Callable[[Target, asyncio.Task[PacelineError]], None]") -> None:
        """Run rounds until the target is stopped or given up."""
        assert self.replica.description
        model = self.replica.description.lasting
        # A replica that only restarted keeps its circuit: it may fail again and again.
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
        """Drop the given generations that are here and have ended."""
        if self._serving:
            self._serving.scheduler.retire(generations)
            if self._circuit_state is CircuitState.HALF_OPEN and not self.live_count:
                self._serving.guard.circuit.gave_up()  # the generation of the trial is gone

    def ended(self) -> list[Generation]:
        """Hand over the generations, after the rounds have ended."""
        assert self._serving
        self._rounds, self._is_stopping = None, False
        self._serving.guard.circuit.gave_up()  # a trial whose round was cancelled came to no call
        return self._serving.scheduler.give_up()

    def stop(self) -> None:
        if self._rounds and not self._is_stopping:
            if self.replica.is_silent and self._serving:
                self._serving.guard.lost()
            self._is_stopping = True
            self._rounds.cancel()

    async def stopped(self) -> None:
        if self._rounds:
            await asyncio.gather(self._rounds, return_exceptions=True)

    @property
    def _takes_generations(self) -> bool:
        return self.replica.is_up and self._rounds is not None and not self._is_stopping

    @property
    def _circuit_state(self) -> CircuitState:
        return self._serving.guard.circuit.state if self._serving else CircuitState.CLOSED

    @property
    def may_be_tried(self) -> bool:
        """Whether its circuit is open, and the next generation shows whether it works again."""
        return (
            self._takes_generations
            and self._serving is not None
            and self._circuit_state is CircuitState.OPEN
            and self._serving.guard.circuit.would_allow
        )
