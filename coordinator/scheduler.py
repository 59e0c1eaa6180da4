"""The loop of one target: take a group from the pool, run its round, put it back, free what ended. One loop a lane.

Owns the tasks; knows nothing of text or protobuf, nor of other targets.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from collections.abc import Sequence as Rows
from typing import Protocol

import structlog

from coordinator.draft_length import DraftLength
from coordinator.draft_worth import DraftWorth
from coordinator.metrics import RoundMetrics
from coordinator.policies import Policy, Selection
from coordinator.pool import SequencePool
from coordinator.round import Drafter, RoundLimits, RoundReport, Verifier, run_round, time_left_s
from coordinator.round_tracer import RoundTracer
from coordinator.sequence import Sequence
from coordinator.statistics import Statistics
from paceline.errors import CallTimedOut, Overloaded, PacelineError, PeerFailed, PeerUnavailable

log = structlog.get_logger()

TARGET_AWAY = (PeerUnavailable, CallTimedOut)
"""What a verify call fails with when nothing of it can be the group's fault."""
LOSSES_TO_RUN_ALONE = 2
LOSSES_TO_FAIL = 3
"""A sequence whose rounds end with a lost target so often, the last of them alone, is given no other to bring down."""
DEADLINE_SLACK_S = 0.05
"""A call that ended so near to its requests' deadline ended for that."""


class Releases(Protocol):
    async def release(self, sequence_ids: list[str]) -> None: ...


class ReleasingDrafter(Drafter, Releases, Protocol): ...


class ReleasingVerifier(Verifier, Releases, Protocol): ...


class Scheduler:
    def __init__(
        self,
        pool: SequencePool,
        policy: Policy,
        draft_length: DraftLength,
        drafter: ReleasingDrafter,
        verifier: ReleasingVerifier,
        *,
        batch_size: int,
        lanes: int,
        limits: RoundLimits,
        statistics: Statistics,
        metrics: RoundMetrics,
        tracer: RoundTracer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pool = pool
        self.statistics = statistics
        self._batch_size = batch_size
        self._lanes = lanes
        self._limits = limits
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock
        self._policy = policy
        self._draft_length = draft_length
        self._draft_worth = DraftWorth(lanes, draft_length.leeway)
        self._drafter = drafter
        self._verifier = verifier
        self._releases: set[asyncio.Task[None]] = set()
        self._lost: PacelineError | None = None
        """What a lane found the target away with: the others begin no round, which would count that loss again."""

    def submit(self, sequences: Rows[Sequence]) -> None:
        """Queue the sequences of a request; Overloaded, and none queued, when the queue has no room for them."""
        self.pool.submit([sequence for sequence in sequences if not sequence.ended])

    def retire(self, sequences: Rows[Sequence]) -> None:
        """Drop those of the sequences that are here and ended; those in a round leave with it."""
        self._free(self.pool.retire(sequences))

    def give_up(self) -> list[Sequence]:
        """Hand over all sequences while no round runs, in order of arrival, to be sent whole to another target."""
        sequences = self.pool.give_up()
        # Whatever was in a round may be held, even if no answer ever told so.
        if held := [one.sequence_id for one in sequences if one.first_grouped_s is not None]:
            self._start(self._release(self._verifier, held))
        for sequence in sequences:
            sequence.forget_target()
        return sequences

    async def run(self) -> PacelineError:
        """Run rounds until cancelled, or until the target does not answer: return what its call failed with."""
        self._lost = None
        lanes = [asyncio.create_task(self._run_lane(lane)) for lane in range(self._lanes)]
        try:
            ended, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def close(self) -> None:
        """Free what is left while no round runs, and wait until the services were told."""
        self._free(self.pool.give_up())
        await asyncio.gather(*self._releases)

    async def _run_lane(self, lane: int) -> PacelineError:
        while True:
            window = await self.pool.ready()
            if self._lost:
                return self._lost
            selection = self._select(window)
            if not selection.sequences:
                # What the policy waits for is in flight; the pool changes when it returns.
                await self.pool.changed()
                continue
            try:
                await self._serve(selection, lane, others_wait=self.pool.unserved_count >= self._batch_size)
            except TARGET_AWAY as error:
                return error

    def _select(self, window: list[Sequence]) -> Selection:
        suspects = [sequence for sequence in window if sequence.runs_alone]
        return Selection(suspects[:1]) if suspects else self._policy.select(window, self._batch_size)

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
        """Return None when the round failed. Raises what says that the target is away."""
        draft_counts = self._draft_length.choose(group)
        try:
            with self._tracer.round(group, waits_s, draft_counts, lane) as record:
                report = await run_round(
                    group,
                    self._drafter,
                    self._verifier,
                    self._limits,
                    draft_counts,
                    draft_worth_s=self._draft_worth.seconds,
                    clock=self._clock,
                )
                self._metrics.round_ended(waits_s, report)
                record(report)
        except Exception as error:
            self._metrics.round_failed(waits_s)
            self._judge(group, error)
            return None
        for sequence in group:
            sequence.runs_alone, sequence.loss_count = False, 0
        self._learn(draft_counts, report, sum(waits_s) / len(waits_s))
        return report

    def _judge(self, group: list[Sequence], error: Exception) -> None:
        """Decide whose fault a failed round is: the target's, which is raised, the requests' or one sequence's."""
        if isinstance(error, TARGET_AWAY):
            left_s = time_left_s(group, self._clock())
            if left_s is None or left_s > DEADLINE_SLACK_S:
                _blame(group)
                self._lost = error
                raise error
            error = CallTimedOut("the request's deadline passed")
        elif not isinstance(error, PacelineError):
            log.error("a round failed unexpectedly", exc_info=error)
            error = PeerFailed("the coordinator failed unexpectedly; its log has the details")
        elif len(group) > 1:
            log.warning("a group failed; its sequences run alone", error=str(error), sequences=len(group))
            for sequence in group:
                sequence.runs_alone = True
            return
        log.warning("a group failed", error=str(error), sequences=len(group))
        for sequence in group:
            if not sequence.ended:
                sequence.fail(error)

    def _learn(self, draft_counts: list[int], report: RoundReport, waited_s: float) -> None:
        self.statistics.count_report(report)
        self._draft_worth.observe(report)
        if report.draft_error is None:
            self._draft_length.observe(draft_counts, report, waited_s + report.duration_s)

    async def _relieve(self, shortage: Overloaded) -> None:
        """Make room in the caches: the youngest sequence gives up its own and is sent whole later on.

        One that is alone waits instead: what fills the cache belongs to others.
        """
        if self._releases:
            # Sequences that ended a moment ago may be what still fills the cache.
            await asyncio.wait(self._releases, timeout=shortage.retry_after_s)
            return
        youngest = self.pool.preempt()
        if youngest is None:
            log.info("waiting for room in the target's cache", retry_after_s=shortage.retry_after_s)
            await asyncio.sleep(shortage.retry_after_s)
            return
        self.statistics.count_preemption()
        youngest.forget_caches()
        log.info("preempted the youngest sequence", sequence_id=youngest.sequence_id, live=self.pool.live_count)
        self._start(self._release(self._drafter, [youngest.sequence_id]))
        # Waited for: until the room is there, the next round would only find the same shortage.
        await self._release(self._verifier, [youngest.sequence_id])

    def _free(self, sequences: Iterable[Sequence]) -> None:
        """Tell both services, without waiting: a cache that is not freed is no error of any request."""
        if sequence_ids := [sequence.sequence_id for sequence in sequences]:
            for service in (self._drafter, self._verifier):
                self._start(self._release(service, sequence_ids))

    def _start(self, release: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(release)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, service: Releases, sequence_ids: list[str]) -> None:
        try:
            await service.release(sequence_ids)
        except PacelineError as error:
            log.warning("sequences could not be released yet", error=str(error), sequences=len(sequence_ids))


def _blame(group: list[Sequence]) -> None:
    """Note a lost target on those it was working for: one of them may be what it died of."""
    for sequence in group:
        sequence.loss_count += 1
        sequence.runs_alone = sequence.loss_count >= LOSSES_TO_RUN_ALONE
        if len(group) == 1 and sequence.loss_count >= LOSSES_TO_FAIL and not sequence.ended:
            sequence.fail(PeerUnavailable(f"the target was lost {sequence.loss_count} times while it served this"))
