"""The loop: take a group from the pool, run its round, put it back, free what ended.

Owns the tasks and the counters; knows nothing of text or protobuf.
"""

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Protocol

import structlog

from coordinator.policies import Policy
from coordinator.pool import SequencePool
from coordinator.round import Drafter, RoundLimits, RoundReport, Verifier, run_round
from coordinator.sequence import Sequence
from paceline.errors import Overloaded, PacelineError, PeerFailed

log = structlog.get_logger()


class Releases(Protocol):
    async def release(self, sequence_ids: list[str]) -> None: ...


class RemoteDraft(Drafter, Releases, Protocol): ...


class RemoteTarget(Verifier, Releases, Protocol): ...


class Scheduler:
    def __init__(
        self,
        pool: SequencePool,
        policy: Policy,
        drafter: RemoteDraft,
        verifier: RemoteTarget,
        *,
        batch_size: int,
        limits: RoundLimits,
    ) -> None:
        self.pool = pool
        self.batch_size = batch_size
        self.limits = limits
        self.round_count = 0
        self.drafted_count = 0
        self.accepted_count = 0
        self.preemption_count = 0
        self._policy = policy
        self._drafter = drafter
        self._verifier = verifier
        self._draft_is_up = True
        self._releases: set[asyncio.Task[None]] = set()

    def submit(self, sequences: Rows[Sequence]) -> None:
        """Queue the sequences of a request; Overloaded, and none queued, when the queue has no room for them."""
        self.pool.submit([sequence for sequence in sequences if not sequence.ended])

    def abandon(self, sequences: Rows[Sequence]) -> None:
        """End sequences whose client is gone. Those that ended already are left alone."""
        left = [sequence for sequence in sequences if not sequence.ended]
        for sequence in left:
            sequence.ended = True
        self._free(self.pool.retire(left))

    async def run(self) -> None:
        """Run rounds until cancelled."""
        while True:
            await self.pool.ready()
            group = self._policy.select(self.pool.window(), self.batch_size)
            self.pool.claim(group)
            try:
                report = await self._run_round(group)
            finally:
                self._free(self.pool.settle(group))
            if report and report.shortage:
                await self._relieve(report.shortage)

    async def drain(self) -> None:
        """Wait until the services were told of every sequence that ended."""
        await asyncio.gather(*self._releases)

    async def _run_round(self, group: list[Sequence]) -> RoundReport | None:
        try:
            report = await run_round(group, self._drafter, self._verifier, self.limits)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.error("a round failed unexpectedly", exc_info=error)
                error = PeerFailed("the coordinator failed unexpectedly; its log has the details")
            log.warning("a group failed", error=str(error), sequences=len(group))
            for sequence in group:
                if not sequence.ended:
                    sequence.fail(error)
            return None
        self._count(report)
        return report

    async def _relieve(self, shortage: Overloaded) -> None:
        """Make room in the caches: the youngest sequence gives up its own and is sent whole later on.

        One that is alone waits instead: what fills the cache belongs to others.
        """
        if self._releases:
            # Sequences that ended a moment ago may be what still fills the cache.
            await asyncio.wait(self._releases)
            return
        youngest = self.pool.preempt()
        if youngest is None:
            log.info("waiting for room in the target's cache", retry_after_s=shortage.retry_after_s)
            await asyncio.sleep(shortage.retry_after_s)
            return
        self.preemption_count += 1
        youngest.forget_caches()
        log.info("preempted the youngest sequence", sequence_id=youngest.sequence_id, live=self.pool.live_count)
        # Waited for: until the room is there, the next round would only find the same shortage.
        await self._release([youngest.sequence_id])

    def _count(self, report: RoundReport) -> None:
        self.round_count += 1
        self.drafted_count += report.drafted_count
        self.accepted_count += report.accepted_count
        if report.draft_error and self._draft_is_up:
            log.warning("draft service failed; decoding plainly until it answers", error=str(report.draft_error))
        if report.draft_error is None and not self._draft_is_up and report.drafted_count:
            log.info("draft service answers again")
        if report.draft_error or report.drafted_count:
            self._draft_is_up = report.draft_error is None

    def _free(self, sequences: Iterable[Sequence]) -> None:
        """Tell both services, without waiting: a cache that is not freed is no error of any request."""
        if sequence_ids := [sequence.sequence_id for sequence in sequences]:
            task = asyncio.create_task(self._release(sequence_ids))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, sequence_ids: list[str]) -> None:
        for service in (self._drafter, self._verifier):
            try:
                await service.release(sequence_ids)
            except PacelineError as error:
                log.warning("sequences could not be released", error=str(error), sequences=len(sequence_ids))
