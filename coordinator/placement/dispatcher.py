"""The generations and their targets: who waits, and who is served where. Waiting ones are bound to no target.

Owns the moves; `Matching` chooses, and each target's own `Scheduler` does the rest. When a target is lost, given up or
about to leave, its generations go back to the queue. They keep their order of arrival, so they come ahead of newer
ones, and another target rebuilds their caches from their tokens.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from coordinator.background import Background
from coordinator.placement.matching import Matching, can_take
from coordinator.placement.queue import WaitingQueue
from coordinator.placement.target import Serving, Target
from coordinator.protocols import Remote, RemoteTarget
from coordinator.replicas.replica import Replica, models_up
from coordinator.requests.generation import Generation, Request, request_ids
from coordinator.rounds.residency import Residency
from coordinator.rounds.scheduler import TARGET_AWAY
from paceline.errors import PacelineError, PeerUnavailable
from paceline.types import ModelDescription, ReplicaDescription, ReplicaState

log = structlog.get_logger()

LOOK_INTERVAL_S = 0.25
"""Seconds between looks for generations that have waited too long and for targets that may be tried again."""

MakeServing = Callable[[Replica[RemoteTarget], "Dispatcher"], Serving]
"""Makes what serves with a replica that is up. The dispatcher is its `Others`, and is told of room in its pool."""


class Dispatcher:
    def __init__(
        self,
        make_serving: MakeServing,
        residency: Residency,
        tasks: Background,
        *,
        queue_limit: int,
        target_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        """At most `queue_limit` generations wait; while no target serves, each for at most `target_wait_s`."""
        self._make_serving = make_serving
        self._residency = residency
        self._tasks = tasks
        self._target_wait_s = target_wait_s
        self._clock = clock
        self._targets: dict[str, Target] = {}
        self._leaving: set[Target] = set()
        """Targets whose replicas are gone but whose rounds have not ended yet."""
        self._queue = WaitingQueue(queue_limit, clock)
        self._matching = Matching()
        self._none_serves_since_s: float | None = clock()
        self._serving_changed = asyncio.Event()
        self._was_serving = False
        self._is_closed = False
        self._is_distributing = False
        self.moved_count = 0
        """Generations that left a target, for another one or for the queue."""

    @property
    def live_count(self) -> int:
        return sum(target.live_count for target in self._targets.values())

    @property
    def waiting_count(self) -> int:
        return len(self._queue) + sum(one.waiting_count + one.unread_count for one in self._targets.values())

    @property
    def queue_limit(self) -> int:
        """Most generations that may wait before new ones are refused."""
        return self._queue.limit

    @property
    def is_serving(self) -> bool:
        """Whether a target serves or, with nothing else to try it, waits to be tried; if not, requests can only wait.

        Where none are sent to who does not serve, nothing would else ever try it.
        """
        if self._none_serves_since_s is None:
            return True
        return not self._queue and any(target.may_be_tried for target in self._targets.values())

    async def tell_serving(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` with `is_serving`, now and whenever it changes, until cancelled."""
        while True:
            self._serving_changed.clear()
            tell(self.is_serving)
            await self._serving_changed.wait()

    @property
    def models(self) -> list[ModelDescription]:
        """Descriptions of the targets that are up."""
        return models_up(target.replica for target in self._targets.values())

    def describe(self) -> list[ReplicaDescription]:
        return [target.describe() for target in list(self._targets.values())]

    def check_room(self, generation_count: int) -> None:
        """Raise Overloaded when `generation_count` new generations can neither be served nor wait."""
        targets = self._targets.values()
        free_count, unread_count = sum(one.room for one in targets), sum(one.unread_count for one in targets)
        self._queue.check_room(generation_count, free_count, unread_count)

    def submit(self, request: Request) -> None:
        """Queue a request. Raise Overloaded and queue nothing when there is no room for all of it."""
        self.check_room(len(request.unfinished))
        self._queue.add(request)
        self.distribute()

    def abandon(self, request: Request) -> None:
        """End the unfinished generations of a request whose client is gone."""
        left = request.unfinished
        for generation in left:
            generation.ended = True
        self._retire(left)

    def end(self, reason: Callable[[Generation], PacelineError | None]) -> None:
        """End every waiting or served generation for which `reason` returns an error."""
        generations = [*self._queue, *(one for target in self._with_leaving for one in target.generations)]
        ended = []
        for generation in generations:
            if not generation.ended and (error := reason(generation)):
                generation.fail(error)
                ended.append(generation)
        self._retire(ended)

    def has_fitting(self, besides: Replica[Remote]) -> bool:
        """Return whether another target is left that was seen to fit."""
        return any(one.is_left for one in self._targets.values() if one.replica is not besides)

    @property
    def _with_leaving(self) -> list[Target]:
        return [*self._targets.values(), *self._leaving]

    def _retire(self, ended: list[Generation]) -> None:
        self._residency.free(self._queue.remove(ended))
        for target in self._with_leaving:
            target.retire(ended)

    async def run(self) -> None:
        """Look after waiting generations again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.expire()
            self._settle()

    def expire(self) -> None:
        """Fail the generations that have waited too long for a target."""
        if self._none_serves_since_s is None:
            return
        latest_s = self._clock() - self._target_wait_s
        overdue = [one for one in self._queue if max(one.request.submitted_s, self._none_serves_since_s) <= latest_s]
        for generation in overdue:
            generation.fail(
                PeerUnavailable(f"no target service was there for {self._target_wait_s:g} s; try again later")
            )
        self._retire(overdue)

    def changed(self, replica: Replica[RemoteTarget]) -> None:
        """Use a replica that is up; move the generations of a replica that is not."""
        if replica.address not in self._targets:
            self._targets[replica.address] = Target(replica, partial(self._make_serving, replica, self), self._tasks)
        target = self._targets[replica.address]
        if replica.is_up and not target.is_running:
            target.start(self._ended)
        self._settle()

    def left(self, replica: Replica[RemoteTarget]) -> None:
        """Forget a replica that is gone."""
        target = self._targets.pop(replica.address)
        if target.is_running:
            self._leaving.add(target)
            target.stop()
        self._settle()

    def _ended(self, target: Target, rounds: asyncio.Task[PacelineError]) -> None:
        """Move the generations of a target whose rounds have ended."""
        self._leaving.discard(target)
        failure = None if rounds.cancelled() else rounds.exception() or rounds.result()
        if self._is_closed or (failure and not isinstance(failure, PacelineError)):
            return
        generations = target.ended()
        if isinstance(failure, TARGET_AWAY):
            target.replica.lose(failure)
        self.moved_count += len(generations)
        if generations:
            count, names = len(generations), request_ids(generations)
            log.warning("sequences move", away_from=target.replica.address, sequences=count, requests=names)
        if target.replica.is_up and self._targets.get(target.replica.address) is target:
            target.start(self._ended)  # it came back meanwhile, or its circuit decides when it is tried again
        self._queue.put_back(generations)
        self._settle()

    def _settle(self) -> None:
        """Stop targets that are not to be used any more, and place waiting generations."""
        targets = self._targets.values()
        is_served = any(target.is_healthy for target in targets)
        for target in targets:
            # A target that is about to leave goes on as long as there is no other.
            if not target.replica.is_up and (is_served or target.replica.state is not ReplicaState.DRAINING):
                target.stop()
        if is_served is not (self._none_serves_since_s is None):
            self._none_serves_since_s = None if is_served else self._clock()
        self.distribute()
        if self.is_serving is not self._was_serving:
            self._was_serving = not self._was_serving
            self._serving_changed.set()

    def distribute(self) -> None:
        """Give waiting generations to the targets that have room."""
        if self._is_distributing:
            return
        self._is_distributing = True
        try:
            while placement := self._matching.next(self._queue, list(self._targets.values())):
                target, together = placement
                target.give(self._queue.remove(together))
        finally:
            self._is_distributing = False

    def can_take(self, generation: Generation) -> bool:
        """Return whether a target where the generation did not fail may be asked to serve it."""
        return can_take(generation, self._targets.values())

    def take(self, generation: Generation) -> None:
        """Queue a generation that another target is to serve."""
        self.moved_count += 1
        self._queue.put_back([generation])
        self.distribute()

    async def close(self) -> None:
        """Stop all rounds, and wait until the services were told what they may free."""
        self._is_closed = True
        targets = self._with_leaving
        for target in targets:
            target.stop()
        for target in targets:
            await target.stopped()
            if target.is_running:
                self._residency.free(target.ended())
        self._residency.free(self._queue.remove(list(self._queue)))
        await self._residency.close()
