"""The scheduler of one target. Each lane loops: take a group from the pool, run its round, put it back, free the ended.

Owns the lanes' tasks; knows nothing of text, protobuf or other targets.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Protocol

import structlog

from coordinator.protocols import Drafters, GuardedVerifier
from coordinator.replicas.way import Way
from coordinator.requests.generation import Generation, request_ids
from coordinator.rounds.further_rounds import NONE_FURTHER, FurtherCounts
from coordinator.rounds.grouping import Grouping, Groups
from coordinator.rounds.lessons import EndedRound, Lessons
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.policies import Policy, Selection
from coordinator.rounds.pool import GenerationPool
from coordinator.rounds.residency import Residency
from coordinator.rounds.round import RoundLimits, deadlines_s, run_round, time_left_s
from coordinator.rounds.round_report import RoundReport, Shortage
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.tracer import RoundTracer
from coordinator.rounds.wishes import Wish
from paceline.checks import DECODED_TOKENS
from paceline.errors import CallTimedOut, InvalidRequest, PacelineError, PeerFailed, PeerUnavailable

log = structlog.get_logger()

TARGET_AWAY = (PeerUnavailable, CallTimedOut)
"""Errors of a verify call that mean that the target is away."""
FAILED_AT_DEADLINE_S = 0.05
"""A call that failed so near to the deadline of its requests failed for that."""
LOSSES_TO_RUN_ALONE = 2
LOSSES_TO_FAIL = 3
"""A generation that lost this many targets, the last one while alone, fails: it may bring down others."""


class Others(Protocol):
    """The other targets, which may serve generations that failed here."""

    def can_take(self, generation: Generation) -> bool: ...
    def take(self, generation: Generation) -> None: ...


class Scheduler:
    def __init__(
        self,
        address: str,
        pool: GenerationPool,
        policy: Policy,
        grouping: Grouping,
        drafters: Drafters,
        target: GuardedVerifier,
        residency: Residency,
        others: Others,
        way: Way,
        *,
        lanes: int,
        lanes_are_fixed: bool,
        limits: RoundLimits,
        statistics: Statistics,
        metrics: RoundMetrics,
        tracer: RoundTracer,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.statistics = statistics
        self._address = address
        self._lanes = lanes
        self._lanes_are_fixed = lanes_are_fixed
        self._limits = limits
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock
        self._policy = policy
        self._grouping = grouping
        self._drafters = drafters
        self._target = target
        self._residency = residency
        self._others = others
        self._way = way
        self._lessons = Lessons(address, grouping, way, statistics, metrics)
        self._is_relieving = self._waits_for_room = False
        self._lost: PacelineError | None = None
        """The error for which a lane gave the target up. The others then begin no round, to count it once."""

    def retire(self, generations: Sequence[Generation]) -> None:
        """Drop the given generations that are here and have ended; those in a round leave when it ends."""
        self._residency.free(self.pool.retire(generations))

    def give_up(self) -> list[Generation]:
        """Hand over all generations, to be sent whole to another target. No round may be running."""
        generations = self.pool.give_up()
        self._residency.leave_target(generations)
        return generations

    async def run(self) -> PacelineError:
        """Run rounds until cancelled, or until the target is given up; return the error of its call."""
        self._lost = None
        lanes = [asyncio.create_task(self._run_lane(lane)) for lane in range(self._lanes)]
        try:
            ended, _ = await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _run_lane(self, lane: int) -> PacelineError:
        while True:
            window = await self.pool.ready()
            if self._lost:
                return self._lost
            groups = self._groups
            if lane >= self._lane_count(groups):
                await self.pool.changed()
                continue
            selection = self._select(window, groups.size)
            if not selection.generations:
                # The policy waits for generations in flight; the pool changes when they return.
                await self.pool.changed()
                continue
            if given_up_for := await self._serve(selection, lane, groups):
                return given_up_for

    @property
    def _groups(self) -> Groups:
        most_rows = min([self._limits.max_rows, *(one.max_rows for one in self._drafters.usable.values())])
        return self._grouping.now(most_rows, is_near=self._way.is_near)

    def _lane_count(self, groups: Groups) -> int:
        """Lanes that may begin a round now.

        Where services are near, rows that fit into one group gain more from one verify than from two side by side.
        Where they are far, lanes hide each other's ways.
        """
        most = groups.planner.lane_count
        if self._lanes_are_fixed or not self._way.is_near:
            return most
        return min(most, max(1, ceil(self.pool.live_count / groups.size)))

    def _select(self, window: list[Generation], group_size: int) -> Selection:
        suspects = [generation for generation in window if generation.runs_alone]
        selection = Selection(suspects[:1]) if suspects else self._policy.select(window, group_size)
        # Earlier rows get scarce cache room and prompt chunks first, so the oldest generations always progress.
        return replace(selection, generations=sorted(selection.generations, key=lambda one: one.arrival))

    async def _serve(self, selection: Selection, lane: int, groups: Groups) -> PacelineError | None:
        """Run a round for the group. Return the error for which the target is given up, if it is."""
        group = selection.generations
        others_wait = self.pool.unserved_count >= groups.size
        waits_s = self.pool.claim(group)
        self._residency.hold(group, self._target)
        failed: Mapping[Generation, PacelineError] = {}
        shortage = None
        try:
            report = await self._run_round(group, waits_s, lane, groups)
            failed, shortage = report.failed, report.shortage
            if report.drafts_lack_room:
                self._residency.leave_drafts(self.pool.resting)
        except Exception as error:
            is_out_of_time = self._is_out_of_time(group, error)
            if is_out_of_time and not self._target.is_given_up:
                self._metrics.round_cut_off(waits_s)
            else:
                self._metrics.round_failed(waits_s)
            failed = self._judge(group, error, is_out_of_time=is_out_of_time)
        finally:
            self._residency.free(self.pool.settle(group))
        self._target.tried()
        for generation, reason in failed.items():
            self._pass_on_or_fail(generation, reason)
        self.statistics.count_round(
            group_size=len(group),
            batch_size=groups.size,
            is_fallback=selection.is_fallback,
            others_wait=others_wait,
        )
        if not shortage:
            self._waits_for_room = False
        elif not self._lost:
            await self._relieve(shortage)
        return self._lost

    async def _run_round(self, group: list[Generation], waits_s: list[float], lane: int, groups: Groups) -> RoundReport:
        costs, began_s = self.statistics.costs, self._clock()
        with costs.in_flight() as in_flight_count:
            drafters = self._drafters.usable
            wishes = groups.planner.plan(group, {model: one.max_length for model, one in drafters.items()})
            self._leave_other_drafts(wishes)
            is_alone = self._lane_count(groups) == 1
            with self._tracer.round(group, waits_s, [one.most for one in wishes.values()], lane) as record:
                report = await run_round(
                    wishes,
                    drafters,
                    self._target,
                    self._limits,
                    draft_worth_s=groups.draft_worth.seconds,
                    is_alone=is_alone,
                    further=self.further_counts(group),
                    clock=self._clock,
                )
                record(report)
                ended = EndedRound(
                    groups,
                    wishes,
                    report,
                    waits_s,
                    began_s=began_s,
                    ended_s=self._clock(),
                    in_flight_count=in_flight_count,
                    takes_turns=self._takes_turns(groups, is_alone=is_alone),
                )
                # The loop is free when this lane waits: after the next call went out, if nothing is waited for before.
                asyncio.get_running_loop().call_soon(self._lessons.take_in, ended)
        return report

    def _leave_other_drafts(self, wishes: Mapping[Generation, Wish]) -> None:
        """Free generations that are to ask draft services of another model than before at those they asked."""
        moved = [
            one for one, wish in wishes.items() if wish.asked_count and one.draft_model not in ("", wish.draft_model)
        ]
        if moved:
            self._residency.leave_drafts(moved)
            self._residency.hold(moved, self._target)

    def _takes_turns(self, groups: Groups, *, is_alone: bool) -> bool:
        """Return whether groups run one after another: a single one is alone in any number of lanes."""
        return is_alone or (self._way.is_near and self.pool.live_count <= groups.size)

    def further_counts(self, group: list[Generation]) -> FurtherCounts:
        """Return the rounds that the target may run by itself after one of this group.

        None may run where other coordinators, prompts or the end of a request's time wait.
        """
        if self._grouping.is_shared or any(one.target_lack > DECODED_TOKENS for one in self.pool.live):
            return NONE_FURTHER
        ends_s = deadlines_s(group)
        return self._lessons.further.counts(min(ends_s) - self._clock() if ends_s else None)

    def _is_out_of_time(self, group: list[Generation], error: Exception) -> bool:
        """Return whether a round failed because its requests' time is over."""
        left_s = time_left_s(group, self._clock())
        return isinstance(error, TARGET_AWAY) and left_s is not None and left_s <= FAILED_AT_DEADLINE_S

    def _judge(
        self, group: list[Generation], error: Exception, *, is_out_of_time: bool
    ) -> dict[Generation, PacelineError]:
        """Decide whose fault a failed round is: the target's, which is given up, the requests' or one generation's.

        Return the generations that go on elsewhere or fail, with the error.
        """
        if is_out_of_time:
            error = CallTimedOut("the request's deadline passed")
        elif isinstance(error, TARGET_AWAY):
            self._blame(group)
            self._lost = error
            return {}
        elif not isinstance(error, PacelineError):
            log.error("a round failed unexpectedly", exc_info=error)
            error = PeerFailed("the coordinator failed unexpectedly; its log has the details")
        names, is_given_up = request_ids(group), self._target.is_given_up
        log.warning(
            "a group failed",
            target=self._address,
            error=str(error),
            sequences=len(group),
            requests=names,
            target_given_up=is_given_up,
        )
        if is_given_up:
            self._lost = error
        if isinstance(error, CallTimedOut) or len(group) == 1:
            return dict.fromkeys(group, error)
        # One generation may be the cause: rounds alone will show. It is not if the target fails whatever it is given.
        for generation in group:
            generation.runs_alone = not is_given_up
        return {}

    def _blame(self, group: list[Generation]) -> None:
        """Note the lost target on each generation of its group: one of them may have brought it down."""
        for generation in group:
            generation.failed_at.add(self._address)
            generation.loss_count += 1
            generation.runs_alone = generation.loss_count >= LOSSES_TO_RUN_ALONE
            if len(group) == 1 and generation.loss_count >= LOSSES_TO_FAIL and not generation.ended:
                generation.fail(
                    PeerUnavailable(f"the target was lost {generation.loss_count} times while it served this")
                )

    def _pass_on_or_fail(self, generation: Generation, error: PacelineError) -> None:
        """Pass a generation that failed alone on to another target; fail it when none is left to try."""
        if generation.ended:
            return
        is_known = self._address in generation.failed_at
        generation.failed_at.add(self._address)
        if isinstance(error, CallTimedOut | InvalidRequest):
            generation.fail(error)
        elif self._others.can_take(generation):
            self.pool.hand_over(generation)
            self._residency.leave_target([generation])
            self._others.take(generation)
        elif is_known or not self._lost:
            generation.fail(error)
        self.retire([generation])

    async def _relieve(self, shortage: Shortage) -> None:
        """Make room in the target's cache: the youngest generations give up as much of theirs as is missing.

        A generation that is alone waits instead: the cache is full of other coordinators' sequences.
        """
        if self._is_relieving:
            await self.pool.changed()  # another lane is making room
            return
        self._is_relieving = True
        try:
            # Generations that ended a moment ago may still fill the cache.
            if await self._residency.told(self._target, shortage.retry_after_s):
                return
            self.pool.ran_short(self._free_token_count(shortage))
            if not await self._take_back(dict(shortage.missing_bytes)):
                if not self._waits_for_room:  # told once, however long others fill the cache
                    log.info("waiting for room in the target's cache", target=self._address)
                self._waits_for_room = True
                await asyncio.sleep(shortage.retry_after_s)
        finally:
            self._is_relieving = False
            self._residency.free(self.pool.let_in())

    async def _take_back(self, missing_bytes: dict[Generation, int]) -> bool:
        """Pause the youngest generations and cut their caches until the others have room. Return whether any was.

        The bytes that a paused generation lacked itself are no longer needed. Each keeps the cache that nobody needs.
        """
        freed_bytes, is_changed = 0, False
        while missing_bytes and freed_bytes < max(1, sum(missing_bytes.values())) and (victim := self.pool.victim()):
            if self.pool.is_in_flight(victim):
                self.pool.hold_back(victim)
                await self.pool.changed()  # it is cut when its round settles
                continue
            is_changed = True
            if self.pool.pause(victim):
                self.statistics.count_preemption()
            if victim in missing_bytes:
                del missing_bytes[victim]
                continue
            length = self._length_to_keep(victim, sum(missing_bytes.values()) - freed_bytes)
            freed_bytes += await self._residency.take_back(victim, length)
        return is_changed

    def _free_token_count(self, shortage: Shortage) -> int:
        """Return the tokens for which the cache still had room; 0 if the target does not say what rows lacked."""
        token_bytes, most = self._limits.token_bytes, self._limits.prefill_chunk_tokens
        if not token_bytes:
            return 0
        lacks = [(one.target_lack, missing) for one, missing in shortage.missing_bytes.items() if missing]
        return max((min(lack, most) - missing // token_bytes for lack, missing in lacks), default=0)

    def _length_to_keep(self, victim: Generation, missing_bytes: int) -> int:
        """Return the tokens that a generation keeps when it gives up bytes: whole pages, 0 if sizes are unknown."""
        token_bytes, page_tokens = self._limits.token_bytes, self._limits.page_tokens
        if missing_bytes <= 0 or not (token_bytes and page_tokens):
            return 0
        kept = victim.target_cached_length - -(-missing_bytes // token_bytes)
        return max(0, kept // page_tokens * page_tokens)
