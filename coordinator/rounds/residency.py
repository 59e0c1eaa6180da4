"""Where generations are cached, and the telling of services what they may free.

Owns from when to when a generation may be held by a target and by the drafts: whoever ends or moves one says so here,
and here alone services are told, each once. What a service could not be told it is owed, which its client keeps.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable

import structlog

from coordinator.protocols import Releases, Verifier
from coordinator.requests.sequence import Sequence
from paceline.errors import PacelineError
from paceline.types import RolledBack, SequenceLength

log = structlog.get_logger()


class Residency:
    def __init__(self, drafter: Releases) -> None:
        self._drafter = drafter
        self._targets: dict[Sequence, Verifier] = {}
        """Who may hold something of a sequence. One that is here may be cached by the drafts too."""
        self._drafted: set[Sequence] = set()
        self._telling: dict[asyncio.Task[None], Releases] = {}

    def hold(self, sequences: Iterable[Sequence], target: Verifier) -> None:
        """A round with that target begins for them."""
        for sequence in sequences:
            self._targets[sequence] = target
            self._drafted.add(sequence)

    def leave_target(self, sequences: Iterable[Sequence]) -> None:
        """They go on at another target, to which they are sent whole. What drafts hold of them stays good."""
        self._tell_targets(sequences)

    def free(self, sequences: Iterable[Sequence]) -> None:
        """They ended, and are in no round: nothing of them is needed any more."""
        ended = list(sequences)
        self._tell_targets(ended)
        if drafted := [one.sequence_id for one in ended if one in self._drafted]:
            self._drafted.difference_update(ended)
            self._tell(self._drafter, drafted)

    async def take_back(self, sequence: Sequence, length: int) -> int:
        """Let its target keep so many tokens of a sequence, and return the bytes that this freed.

        It is in no round, and begins none before this returns.
        What drafts hold of it stays: it goes on from there. One that cannot be cut is freed.
        """
        target = self._targets.get(sequence)
        if target is None:
            sequence.forget_target()
            return 0
        if length >= sequence.target_cached_length:
            return 0
        sequence.target_cached_length = length
        try:
            (result,) = await target.rollback([SequenceLength(sequence.sequence_id, length)])
        except PacelineError as error:
            result = error
        if isinstance(result, RolledBack):
            return result.freed_bytes
        log.warning("a sequence could not be rolled back; it is freed", error=str(result))
        self.leave_target([sequence])
        return 0

    @property
    def held_count(self) -> int:
        """Sequences that some service may hold."""
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

    def _tell_targets(self, sequences: Iterable[Sequence]) -> None:
        by_target: defaultdict[Verifier, list[str]] = defaultdict(list)
        for sequence in sequences:
            sequence.forget_target()
            if target := self._targets.pop(sequence, None):
                by_target[target].append(sequence.sequence_id)
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
        log.warning("sequences could not be released yet", error=str(error), sequences=len(sequence_ids))
