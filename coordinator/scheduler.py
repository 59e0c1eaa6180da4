"""The loop: take a group from the pool, run its round, put it back, free what ended. One such loop a lane.

Owns the tasks; knows nothing of text or protobuf.
"""

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Protocol

import structlog

from coordinator.acceptance import Acceptance
from coordinator.draft_length import DraftLength
from coordinator.metrics import RoundMetrics
from coordinator.policies import Policy, Selection
from coordinator.pool import SequencePool
from coordinator.round import Drafter, RoundLimits, RoundReport, Verifier, run_round
from coordinator.round_tracer import RoundTracer
from coordinator.sequence import Sequence
from coordinator.statistics import Statistics
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
        draft_length: DraftLength,
        drafter: RemoteDraft,
        verifier: RemoteTarget,
        *,
        batch_size: int,
        lanes: int,
        limits: RoundLimits,
        metrics: RoundMetrics,
        tracer: RoundTracer,
    ) -> None:
        self.pool = pool
        self.statistics = Statistics()
        self._batch_size = batch_size
        self._lanes = lanes
        self._limits = limits
        self._metrics = metrics
        self._tracer = tracer
        self._policy = policy
        self._draft_length = draft_length
        self._drafter = drafter
        self._verifier = verifier
        self._acceptance = Acceptance()
        self._draft_is_up = True
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def draft_is_up(self) -> bool:
        """False since a call to the draft service failed, until one does not."""
        return self._draft_is_up

    def submit(self, sequences: Rows[Sequence]) -> None:
        """Queue the sequences of a request; Overloaded, and none queued, when the queue has no room for them."""
        for sequence in sequences:
            sequence.acceptance = Acceptance(self._acceptance.rate)
        self.pool.submit([sequence for sequence in sequences if not sequence.ended])

    def abandon(self, sequences: Rows[Sequence]) -> None:
        """End sequences whose client is gone. Those that ended already are left alone."""
        left = [sequence for sequence in sequences if not sequence.ended]
        for sequence in left:
            sequence.ended = True
        self._free(self.pool.retire(left))

    async def run(self) -> None:
        """Run rounds until cancelled; when one lane fails, all end."""
        async with asyncio.TaskGroup() as lanes:
            for lane in range(self._lanes):
                lanes.create_task(self._run_lane(lane))

    async def drain(self) -> None:
        """Wait until the services were told of every sequence that ended."""
        await asyncio.gather(*self._releases)

    async def _run_lane(self, lane: int) -> None:
        while True:
            window = await self.pool.ready()
            selection = self._policy.select(window, self._batch_size)
            if not selection.sequences:
                # What the policy waits for is in flight; the pool changes when it returns.
                await self.pool.changed()
                continue
            await self._serve(selection, lane, others_wait=self.pool.unserved_count >= self._batch_size)

    async def _serve(self, selection: Selection, lane: int, *, others_wait: bool) -> None:
        group = selection.sequences
        waits_s = self.pool.claim(group)
        try:
            report = await self._run_round(group, waits_s, lane)
        finally:
            self._free(self.pool.settle(group))
        self.statistics.count_round(
            group_size=len(group),
            batch_size=self._batch_size,
            is_fallback=selection.is_fallback,
            others_wait=others_wait,
        )
        if report and report.shortage:
            await self._relieve(report.shortage)

    async def _run_round(self, group: list[Sequence], waits_s: list[float], lane: int) -> RoundReport | None:
        draft_counts = self._draft_length.choose(group)
        try:
            with self._tracer.round(group, waits_s, draft_counts, lane) as record:
                report = await run_round(group, self._drafter, self._verifier, self._limits, draft_counts)
                self._metrics.round_ended(waits_s, report)
                record(report)
        except Exception as error:
            self._metrics.round_failed(waits_s)
            if not isinstance(error, PacelineError):
                log.error("a round failed unexpectedly", exc_info=error)
                error = PeerFailed("the coordinator failed unexpectedly; its log has the details")
            log.warning("a group failed", error=str(error), sequences=len(group))
            for sequence in group:
                if not sequence.ended:
                    sequence.fail(error)
            return None
        self._learn(draft_counts, report)
        return report

    def _learn(self, draft_counts: list[int], report: RoundReport) -> None:
        for row in report.rows:
            self._acceptance.add(row.accepted_count, row.drafted_count)
        self.statistics.count_report(report)
        if report.draft_error is None:
            self._draft_length.observe(draft_counts, report)
        if report.draft_error and self._draft_is_up:
            log.warning("draft service failed; decoding plainly until it answers", error=str(report.draft_error))
        if report.draft_error is None and not self._draft_is_up and report.drafted_count:
            log.info("draft service answers again")
        if report.draft_error or report.drafted_count:
            self._draft_is_up = report.draft_error is None

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
        self.statistics.count_preemption()
        youngest.forget_caches()
        log.info("preempted the youngest sequence", sequence_id=youngest.sequence_id, live=self.pool.live_count)
        # Waited for: until the room is there, the next round would only find the same shortage.
        await self._release([youngest.sequence_id])

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
