"""Where generations are cached, and the telling of services what they may free.

Owns from when to when a generation may be held by a target and by the drafts: whoever ends or moves one says so here,
and here alone services are told, each once. What a service could not be told it is owed, which its client keeps.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable

import structlog

from coordinator.protocols import Releases, Verifier
from coordinator.requests.generation import Generation
from paceline.errors import PacelineError
from paceline.types import RolledBack, SequenceLength

log = structlog.get_logger()


class Residency:
    def __init__(self, drafter: Releases) -> None:
        self._drafter = drafter
        self._targets: dict[Generation, Verifier] = {}
        """Who may hold something of a generation. One that is here may be cached by the drafts too."""
        self._drafted: set[Generation] = set()
        self._telling: dict[asyncio.Task[None], Releases] = {}

    def hold(self, generations: Iterable[Generation], target: Verifier) -> None:
        """A round with that target begins for them."""
        for generation in generations:
            self._targets[generation] = target
            self._drafted.add(generation)

    def leave_target(self, generations: Iterable[Generation]) -> None:
        """They go on at another target, to which they are sent whole. What drafts hold of them stays good."""
        self._tell_targets(generations)

    def free(self, generations: Iterable[Generation]) -> None:
        """They ended, and are in no round: nothing of them is needed any more."""
        ended = list(generations)
        self._tell_targets(ended)
        if drafted := [one.sequence_id for one in ended if one in self._drafted]:
            self._drafted.difference_update(ended)
            self._tell(self._drafter, drafted)

    async def take_back(self, generation: Generation, length: int) -> int:
        """Let its target keep so many tokens of a generation, and return the bytes that this freed.

        It is in no round, and begins none before this returns.
        What drafts hold of it stays: it goes on from there. One that cannot be cut is freed.
        """
        target = self._targets.get(generation)
        if target is None:
            generation.forget_target()
            return 0
        if length >= generation.target_cached_length:
            return 0
        generation.target_cached_length = length
        try:
            (result,) = await target.rollback([SequenceLength(generation.sequence_id, length)])
        except PacelineError as error:
            result = error
        if isinstance(result, RolledBack):
            return result.freed_bytes
        log.warning("a generation could not be rolled back; it is freed", error=str(result))
        self.leave_target([generation])
        return 0

    @property
    def held_count(self) -> int:
        """Generations that some service may hold."""
        return len(self._drafted)

    async def told(self, target: Releases, timeout_s: float) -> bool:
        """Wait until the target was told all; return whether there was anything to tell."""
        telling = [task for task, service in self._telling.items() if service is target]
        if telling:
            await asyncio.wait(telling, timeout=timeout_s)
        return bool(telling)

    async def close(self) -> None:
        """Wait until all were told."""
        await asyncio.gather(*self._telling)

    def _tell_targets(self, generations: Iterable[Generation]) -> None:
        by_target: defaultdict[Verifier, list[str]] = defaultdict(list)
        for generation in generations:
            generation.forget_target()
            if target := self._targets.pop(generation, None):
                by_target[target].append(generation.sequence_id)
        for target, sequence_ids in by_target.items():
            self._tell(target, sequence_ids)

    def _tell(self, service: Releases, sequence_ids: list[str]) -> None:
        self._start(service, _release(service, sequence_ids))

    def _start(self, service: Releases, work: Coroutine[None, None, None]) -> None:
        """Without waiting: a cache that is not freed is no error of any request."""
        task = asyncio.create_task(work)
        self._telling[task] = service
        task.add_done_callback(lambda ended: self._telling.pop(ended))


async def _release(service: Releases, sequence_ids: list[str]) -> None:
    try:
        await service.release(sequence_ids)
    except PacelineError as error:
        log.warning("generations could not be released yet", error=str(error), generations=len(sequence_ids))
