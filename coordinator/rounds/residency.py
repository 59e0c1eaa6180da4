"""Residency: where the caches of generations are, and which of them services may free.

Owns the time from when to when a target and the draft services may hold a generation. All code that ends or moves a
generation reports it here, and services are told here alone, each once: by their next request, or by a call if none
follows soon. If a service cannot be told, its client keeps the sequence as owed.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress

import structlog

from coordinator.protocols import Releases, Verifier
from coordinator.requests.generation import Generation
from paceline.errors import PacelineError
from paceline.tasks import kept_task
from paceline.types import RolledBack, SequenceLength

log = structlog.get_logger()

NEXT_REQUEST_S = 0.1
"""Seconds in which a request is expected to follow. A cache is held as long, if none does."""


class Residency:
    def __init__(self, drafter: Releases) -> None:
        self._drafter = drafter
        self._targets: dict[Generation, Verifier] = {}
        """The target that may hold a generation."""
        self._drafted: set[Generation] = set()
        """Generations that a draft service may hold."""
        self._timers: dict[Releases, asyncio.TimerHandle] = {}
        """For services that are told by a call, if no request does before."""
        self._telling: set[asyncio.Task[int]] = set()

    def hold(self, generations: Collection[Generation], target: Verifier) -> None:
        """Note that a round with the target begins for the generations."""
        self._targets.update(dict.fromkeys(generations, target))
        self._drafted.update(generations)

    def leave_target(self, generations: Iterable[Generation]) -> None:
        """Free the generations at their target; another gets them whole. Their draft caches stay valid."""
        self._tell_targets(generations)

    def free(self, generations: Iterable[Generation]) -> None:
        """Free generations that have ended and are in no round, at all services."""
        ended = list(generations)
        self._tell_targets(ended)
        self.leave_drafts(ended)

    def leave_drafts(self, generations: Iterable[Generation]) -> None:
        """Free generations that are in no round at the draft services, which get them whole if they go on."""
        if drafted := [one for one in generations if one in self._drafted]:
            for one in drafted:
                one.forget_draft()
            self._drafted.difference_update(drafted)
            self._owe(self._drafter, [one.sequence_id for one in drafted])

    async def take_back(self, generation: Generation, length: int) -> int:
        """Cut a generation's target cache to `length` tokens, and return the bytes that this freed.

        The generation is in no round, and begins none before this returns. Its draft cache stays valid. If the target
        cannot cut it, it is freed there.
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
        log.warning("a sequence could not be rolled back; it is freed", error=str(result))
        self.leave_target([generation])
        return 0

    @property
    def held_count(self) -> int:
        """Count of generations that some service may hold."""
        return len(self._drafted | self._targets.keys())

    async def told(self, target: Releases, timeout_s: float) -> bool:
        """Tell the target everything now; return whether there was anything to tell."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await _release(target) > 0
        return True

    async def close(self) -> None:
        """Tell all services everything now."""
        for service, timer in [*self._timers.items()]:
            timer.cancel()
            self._tell(service)
        await asyncio.gather(*self._telling)

    def _tell_targets(self, generations: Iterable[Generation]) -> None:
        by_target: defaultdict[Verifier, list[str]] = defaultdict(list)
        for generation in generations:
            generation.forget_target()
            if target := self._targets.pop(generation, None):
                by_target[target].append(generation.sequence_id)
        for target, sequence_ids in by_target.items():
            self._owe(target, sequence_ids)

    def _owe(self, service: Releases, sequence_ids: list[str]) -> None:
        service.owe(sequence_ids)
        if service not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[service] = loop.call_later(NEXT_REQUEST_S, self._tell, service)

    def _tell(self, service: Releases) -> None:
        del self._timers[service]
        kept_task(_release(service), self._telling)


async def _release(service: Releases) -> int:
    """Free what is owed; return how many sequences. A cache that is not freed is no error of any request."""
    try:
        return await service.release()
    except PacelineError as error:
        log.warning("sequences could not be released yet", error=str(error))
        return 0
