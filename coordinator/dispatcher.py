"""Which target serves which sequence: the least loaded one, and another when that goes away.

Owns placement and what waits while no target is there; each target's own `Scheduler` does the rest. The sequences of a
target that is lost, or about to leave, go to others in their order of arrival, ahead of newer ones, and are rebuilt
there from their tokens.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from typing import Protocol

import structlog

from coordinator.background import Background
from coordinator.pool import SequencePool
from coordinator.replica import Remote, Replica
from coordinator.round import Verifier
from coordinator.scheduler import Scheduler
from coordinator.sequence import Sequence
from paceline.errors import PacelineError, PeerUnavailable
from paceline.types import ReplicaDescription, ReplicaState

log = structlog.get_logger()

EXPIRY_INTERVAL_S = 0.5


class RemoteTarget(Remote, Verifier, Protocol): ...


MakeScheduler = Callable[[Replica[RemoteTarget], Iterator[int]], Scheduler]
"""For a replica that is up; its pool takes the numbers of arrival from the iterator."""


@dataclass(eq=False)
class _Target:
    replica: Replica[RemoteTarget]
    scheduler: Scheduler | None = None
    """None until the replica was up once."""
    rounds: asyncio.Task[PacelineError] | None = None
    """While its scheduler runs."""
    is_stopping: bool = False
    """Its rounds were cancelled, and its sequences are about to move."""

    @property
    def takes_sequences(self) -> bool:
        return self.replica.is_up and self.rounds is not None and not self.is_stopping

    @property
    def sequence_count(self) -> int:
        return self.scheduler.pool.live_count + self.scheduler.pool.waiting_count if self.scheduler else 0

    @property
    def load(self) -> tuple[int, float]:
        """Sequences it is to serve, then how full its cache is."""
        return self.sequence_count, self.replica.kv_use

    def stop(self) -> None:
        if self.rounds and not self.is_stopping:
            self.is_stopping = True
            self.rounds.cancel()


class Dispatcher:
    def __init__(
        self,
        make_scheduler: MakeScheduler,
        tasks: Background,
        *,
        queue_limit: int,
        target_wait_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """While no target is up, `queue_limit` new sequences wait, and all for `target_wait_s` at most."""
        self._make_scheduler = make_scheduler
        self._tasks = tasks
        self._target_wait_s = target_wait_s
        self._clock = clock
        self._arrivals = count(1)
        self._targets: dict[str, _Target] = {}
        # Nothing goes live in it: it is a queue and no more.
        self._stranded = SequencePool(0, queue_limit, clock, self._arrivals)
        self._none_up_since_s: float | None = clock()
        self._is_closed = False
        self.moved_count = 0
        """Sequences that went from one target to another, or had to wait for one."""

    @property
    def live_count(self) -> int:
        return sum(pool.live_count for pool in self._pools)

    @property
    def waiting_count(self) -> int:
        return sum(pool.waiting_count for pool in self._pools)

    @property
    def queue_limit(self) -> int:
        """Most sequences that may wait before new ones are refused."""
        return sum(pool.queue_limit for pool in self._pools[1:]) or self._stranded.queue_limit

    @property
    def _pools(self) -> list[SequencePool]:
        schedulers = [target.scheduler for target in self._targets.values()]
        return [self._stranded, *(scheduler.pool for scheduler in schedulers if scheduler)]

    def describe(self) -> list[ReplicaDescription]:
        return [
            ReplicaDescription(address, target.replica.state, target.sequence_count)
            for address, target in self._targets.items()
        ]

    def check_room(self, count: int) -> None:
        """Raise Overloaded when so many sequences would be refused now."""
        chosen = self._least_loaded()
        (chosen.pool if chosen else self._stranded).check_room(count)

    def submit(self, sequences: Rows[Sequence]) -> None:
        """Queue the sequences of a request, together; Overloaded, and none queued, when there is no room for them."""
        new = [sequence for sequence in sequences if not sequence.ended]
        if chosen := self._least_loaded():
            chosen.submit(new)
        else:
            self._stranded.submit(new)

    def abandon(self, sequences: Rows[Sequence]) -> None:
        """End sequences whose client is gone. Those that ended already are left alone."""
        left = [sequence for sequence in sequences if not sequence.ended]
        for sequence in left:
            sequence.ended = True
        if left:
            self._stranded.retire(left)
            for target in self._targets.values():
                if target.scheduler:
                    target.scheduler.retire(left)

    async def run(self) -> None:
        """Let what waits for a target wait no longer than it may, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.expire()

    def expire(self) -> None:
        """Fail the sequences that have waited for a target for too long."""
        if self._none_up_since_s is None:
            return
        latest_s = self._clock() - self._target_wait_s
        overdue = [one for one in self._stranded.waiting if max(one.submitted_s, self._none_up_since_s) <= latest_s]
        for sequence in overdue:
            sequence.fail(
                PeerUnavailable(f"no target service was there for {self._target_wait_s:g} s; try again later")
            )
        self._stranded.retire(overdue)

    def changed(self, replica: Replica[RemoteTarget]) -> None:
        """Use a replica that is up; move the sequences of one that is not."""
        target = self._targets.setdefault(replica.address, _Target(replica))
        if replica.is_up and target.rounds is None:
            self._start(target)
        self._settle()

    def left(self, replica: Replica[RemoteTarget]) -> None:
        """Forget a replica that is gone."""
        self._targets.pop(replica.address).stop()
        self._settle()

    def _start(self, target: _Target) -> None:
        target.scheduler = target.scheduler or self._make_scheduler(target.replica, self._arrivals)
        target.rounds = self._tasks.start(target.scheduler.run())
        target.rounds.add_done_callback(partial(self._ended, target))

    def _ended(self, target: _Target, rounds: asyncio.Task[PacelineError]) -> None:
        """The rounds of a target are over: move its sequences."""
        target.rounds, target.is_stopping = None, False
        if self._is_closed or (not rounds.cancelled() and rounds.exception()):
            return
        if not rounds.cancelled():
            target.replica.lose(rounds.result())
        assert target.scheduler
        sequences = target.scheduler.give_up()
        self.moved_count += len(sequences)
        if sequences:
            log.warning("sequences move", away_from=target.replica.address, sequences=len(sequences))
        if target.replica.is_up and self._targets.get(target.replica.address) is target:
            self._start(target)  # it came back meanwhile
        self._place(sequences)
        self._settle()

    def _settle(self) -> None:
        """Stop targets that are not to be used, if there are others or no choice, and place what has no target."""
        has_target = self._least_loaded() is not None
        for target in self._targets.values():
            # One that is about to leave goes on as long as there is no other.
            if not target.replica.is_up and (has_target or target.replica.state is not ReplicaState.DRAINING):
                target.stop()
        if has_target:
            self._none_up_since_s = None
            if self._stranded.waiting_count:
                self._place(self._stranded.give_up())
        elif self._none_up_since_s is None:
            self._none_up_since_s = self._clock()

    def _place(self, sequences: list[Sequence]) -> None:
        """Give sequences to targets, those of a request together, or keep them until there is one."""
        for _, together in groupby(sequences, key=lambda one: id(one.stream)):
            chosen = self._least_loaded()
            (chosen.pool if chosen else self._stranded).adopt(together)

    def _least_loaded(self) -> Scheduler | None:
        takers = [target for target in self._targets.values() if target.takes_sequences]
        return min(takers, key=lambda target: target.load).scheduler if takers else None

    async def close(self) -> None:
        """Stop all rounds, and wait until the targets were told of what they may free."""
        self._is_closed = True
        running = [target.rounds for target in self._targets.values() if target.rounds]
        for target in self._targets.values():
            target.stop()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(target.scheduler.close() for target in self._targets.values() if target.scheduler))
