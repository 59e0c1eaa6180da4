"""Rounds that a target runs by itself: what its heads drafted is verified in the same call, as in other rounds."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from coordinator.replicas.plausibility import check_verdicts
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.requests.guess import Guess
from coordinator.rounds.acceptances import Acceptances
from coordinator.rounds.cost_counts import CostCounts
from coordinator.rounds.costs import CONSTANT, DRAFTED, HEADS, HEADS_CALL, TARGET_PARTS, RoundWork
from coordinator.rounds.further_rounds import NEAR, NONE_FURTHER, WAYS, FurtherCounts, FurtherRounds
from coordinator.rounds.round import RoundLimits, run_round
from coordinator.rounds.round_report import RoundReport, RowReport
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.wishes import Wish
from coordinator.wiring import Clocks
from paceline.checks import DECODED_TOKENS, MAX_FURTHER_COUNT
from paceline.errors import PeerFailed
from paceline.types import (
    CallTiming,
    DraftSource,
    GenerationRequest,
    HopTime,
    TokenIds,
    Verdict,
    Verdicts,
    VerifyRow,
)
from tests.coordinators import collect, make_serving, scheduling, submit
from tests.fakes.model_services import (
    CHUNK_TOKENS,
    VOCABULARY_SIZE,
    Clock,
    FakeDrafter,
    WithHeads,
    continuation,
    next_token,
)
from tests.generations import generation_of

PROMPT = (5, 6, 7)
HEADS_COUNT = 3
LIMITS = RoundLimits(VOCABULARY_SIZE, CHUNK_TOKENS, heads_count=HEADS_COUNT)
DRAFTED_BY_HEADS = Wish(propose_count=HEADS_COUNT)


async def asked_for(
    one: Generation, wish: Wish = DRAFTED_BY_HEADS, *others: Generation, further: FurtherCounts = NEAR
) -> int:
    """Return how many further rounds a row asks for in a round that may have as many as `further`."""
    verifier = WithHeads()
    await run_round({one: wish} | dict.fromkeys(others, Wish()), {}, verifier, LIMITS, further=further)
    return verifier.calls[0][0].further_count


def report_of(first: Sequence[RowReport], further: Sequence[RowReport] = ()) -> RoundReport:
    hop = HopTime(0.001, 0.0, 0.008)
    return RoundReport(
        list(first),
        0.01,
        HopTime(),
        hop,
        None,
        None,
        heads_count=6,
        further=[further] if further else [],
        pass_count=1 + bool(further),
    )


@pytest.mark.parametrize("draft_count", [HEADS_COUNT, "auto"])
@pytest.mark.parametrize("max_new_tokens", [*range(1, 12), 40])
@pytest.mark.parametrize("wrong_every", [1, 2, 5, 1000])
async def test_outputs_are_the_targets_own_in_fewer_calls(
    draft_count: int | str, max_new_tokens: int, wrong_every: int
) -> None:
    verifier = WithHeads(wrong_every)
    async with scheduling(FakeDrafter(0.0), verifier, draft_count=draft_count) as (admission, scheduler):
        asked = [GenerationRequest(TokenIds((*PROMPT, one)), max_new_tokens, tell_rounds=True) for one in range(3)]
        requests = [submit(scheduler, admission.admit(one)) for one in asked]
        outputs = await asyncio.gather(*map(collect, requests))
        statistics = scheduler.statistics.snapshot()
    assert [ids for ids, _ in outputs] == [continuation((*PROMPT, one), max_new_tokens) for one in range(3)]
    rows = sum(map(len, verifier.calls))
    round_count = sum(last.finish.usage.round_count for _, last in outputs if last.finish)
    assert round_count >= rows
    if max_new_tokens == 40 and draft_count != "auto":
        assert round_count > 1.5 * rows
    assert sum(count * size for size, count in statistics.round_counts_by_group_size) == round_count


async def test_a_further_round_is_told_with_the_rows_that_took_part_in_it() -> None:
    """It was told with those of the round before."""
    rows = [generation_of((*PROMPT, number), name=str(number)) for number in range(3)]
    for one in rows:
        one.request.tells_rounds = True
    wishes = dict.fromkeys(rows[:2], DRAFTED_BY_HEADS) | {rows[2]: Wish()}
    await run_round(wishes, {}, WithHeads(), LIMITS, further=FurtherCounts(1))
    told = []
    for one, round_count in zip(rows, (2, 2, 1), strict=True):
        pieces = one.request.stream.pieces()
        rounds = [(await anext(pieces)).round for _ in range(round_count)]
        told.append([round_.group_size for round_ in rounds if round_])
    assert told == [[3, 2], [3, 2], [3]]


async def test_a_further_round_is_told_without_time_of_its_own() -> None:
    verifier = WithHeads()
    one = generation_of()
    one.request.tells_rounds, one.queued_s = True, 3.0
    await run_round({one: DRAFTED_BY_HEADS}, {}, verifier, LIMITS, further=FurtherCounts(1))
    pieces = one.request.stream.pieces()
    first, second = (await anext(pieces)).round, (await anext(pieces)).round
    assert first and second
    assert (first.source, first.drafted_count) == (None, 0) and first.verify.total_s > 0
    assert (second.source, second.drafted_count, second.accepted_count) == (DraftSource.HEADS, HEADS_COUNT, HEADS_COUNT)
    assert (second.round_s, second.waited_s, second.propose, second.verify) == (0.0, 0.0, None, HopTime())


async def test_rows_ask_for_one_where_heads_draft_and_the_output_goes_on() -> None:
    assert await asked_for(generation_of()) == 1
    assert await asked_for(generation_of(), Wish()) == 0
    assert await asked_for(generation_of(max_new_tokens=1)) == 0


@pytest.mark.parametrize(("others", "expected"), [((DRAFTED_BY_HEADS, Wish()), 1), ((Wish(), Wish()), 0)])
async def test_none_runs_for_few_rows_while_the_others_wait(others: Sequence[Wish], expected: int) -> None:
    verifier = WithHeads()
    wishes = [DRAFTED_BY_HEADS, *others]
    group = {generation_of(name=str(place)): wish for place, wish in enumerate(wishes)}
    await run_round(group, {}, verifier, LIMITS, further=NEAR)
    assert [row.further_count for row in verifier.calls[0]] == [expected * (one is DRAFTED_BY_HEADS) for one in wishes]


def further_after(*calls: HopTime, pass_count: int = 1, prompt_count: int = 0) -> FurtherRounds:
    """Return what was learned from many such calls."""
    further = FurtherRounds()
    for call in calls * WAYS:
        report = report_of([RowReport(0, 0, 1)])
        further.observe(replace(report, verify=call, pass_count=pass_count, prompt_token_count=prompt_count))
    return further


@pytest.mark.parametrize(
    ("way_s", "expected"),
    [
        (0.009, NEAR),
        (0.025, FurtherCounts(2, 2)),
        (1.0, FurtherCounts(MAX_FURTHER_COUNT, MAX_FURTHER_COUNT)),
    ],
)
@pytest.mark.parametrize("pass_count", [1, 3])
def test_as_many_run_as_take_the_time_of_the_way(way_s: float, expected: FurtherCounts, pass_count: int) -> None:
    call = HopTime(way_s, 0.005, 0.01 * pass_count)
    assert further_after(call, pass_count=pass_count).counts(None) == expected


def test_a_target_is_near_until_the_shortest_way_of_many_calls_is_long() -> None:
    further = FurtherRounds()
    for _ in range(WAYS):
        assert further.counts(None) == NEAR
        further.observe(replace(report_of([RowReport(0, 0, 1)]), verify=HopTime(0.025, 0.0, 0.01)))
    assert further.counts(None) == FurtherCounts(2, 2)


def test_a_way_that_was_long_while_cores_were_busy_is_not_far() -> None:
    assert further_after(HopTime(0.025, 0.0, 0.01), HopTime(0.004, 0.0, 0.01)).counts(None) == NEAR
    assert further_after(HopTime(0.0029, 0.0, 0.001)).counts(None) == NEAR


def test_calls_with_prompts_say_nothing() -> None:
    assert further_after(HopTime(0.1, 0.0, 0.01), prompt_count=9).counts(None) == NEAR


def test_none_runs_near_a_deadline_which_would_cut_off_all() -> None:
    further = further_after(HopTime(0.02, 0.0, 0.01))
    assert further.counts(1.0) == FurtherCounts(2, 2)
    assert further.counts(0.19) == NONE_FURTHER


def test_a_target_that_does_not_tell_its_work_is_taken_for_near() -> None:
    assert further_after(HopTime(1.0)).counts(None) == NEAR


@pytest.mark.parametrize(
    ("ends_s", "expected"),
    [((0.1, 60.0), NONE_FURTHER), ((0.1, None), NONE_FURTHER), ((60.0, None), FurtherCounts(2, 2))],
)
def test_the_first_deadline_of_a_group_counts(
    ends_s: tuple[float | None, ...], expected: FurtherCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one did, so a request's last tokens were lost beside one that had time."""
    learned = further_after(HopTime(0.02, 0.0, 0.01))
    monkeypatch.setattr("coordinator.rounds.lessons.FurtherRounds", lambda: learned)
    clock = Clock()
    scheduler = make_serving(FakeDrafter(0.0), WithHeads(), batch_size=2, clocks=Clocks(clock)).scheduler
    group = [generation_of(name=str(end_s)) for end_s in ends_s]
    for one, end_s in zip(group, ends_s, strict=True):
        one.request.deadline_s = None if end_s is None else clock.now_s + end_s
    assert scheduler.further_counts(group) == expected


async def test_rows_of_a_far_target_ask_for_them_where_heads_or_nothing_drafts() -> None:
    far = FurtherCounts(4, 4)
    assert await asked_for(generation_of(), Wish(), further=far) == 4
    assert await asked_for(generation_of(), further=far) == 4
    assert await asked_for(generation_of(max_new_tokens=3), Wish(), further=far) == 2
    copy = Wish(source=DraftSource.SUFFIX, token_ids=tuple(continuation(PROMPT, 2)))
    assert await asked_for(generation_of(), copy, further=far) == 0
    verifier, others = WithHeads(), {generation_of(name="plain"): Wish(), generation_of(name="copies"): copy}
    await run_round(others, {}, verifier, LIMITS, further=far)
    assert [row.further_count for row in verifier.calls[0]] == [0, 0]


class Far(WithHeads):
    """A target without heads, to which the way takes three times as long as a pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.description = replace(self.description, heads_draft_count=0)
        self._clock = clock

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        pass_count = 1.0 + max(row.further_count for row in rows)
        self._clock.advance(3.0 + pass_count)
        return replace(await super().verify(rows, timeout_s), timing=CallTiming(executed_s=pass_count))


async def test_a_far_target_answers_several_plain_rounds_in_a_call() -> None:
    clock = Clock()
    verifier = Far(clock)
    # The first call has the prompt, and the call after the last of these ways goes out before it is learned from.
    count = 1 + WAYS + 1
    asked = GenerationRequest(TokenIds(PROMPT), count + 29, ignore_end_tokens=True)
    async with scheduling(FakeDrafter(0.0), verifier, draft_count=0, clocks=Clocks(clock)) as (admission, scheduler):
        output, last = await collect(submit(scheduler, admission.admit(asked)))
    assert output == [next_token((*PROMPT, *output[:place])) for place in range(len(output))]
    assert last.finish and last.finish.usage.round_count == len(output) == count + 29
    assert [call[0].further_count for call in verifier.calls] == [0] * count + [3] * 7 + [0]


async def test_none_begins_after_a_long_copy() -> None:
    copied = tuple(continuation(PROMPT, 5))

    def wish(count: int) -> Wish:
        return Wish(source=DraftSource.SUFFIX, token_ids=copied[:count], propose_count=HEADS_COUNT)

    assert await asked_for(generation_of(), wish(HEADS_COUNT)) == 1
    # Which is as long as any that heads draft, however few tokens are worth their price now.
    assert await asked_for(generation_of(), replace(wish(HEADS_COUNT), propose_count=HEADS_COUNT - 1)) == 1
    assert await asked_for(generation_of(), wish(HEADS_COUNT + 1)) == 0


async def test_none_begins_beside_a_prompt_whose_first_token_would_wait() -> None:
    assert (
        await asked_for(generation_of(), DRAFTED_BY_HEADS, generation_of((7,) * (DECODED_TOKENS + 1), name="other"))
        == 0
    )


class Shared(WithHeads):
    """A target that works for others too."""

    worked_s = 0.0

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        self.worked_s += 10.0
        return replace(verdicts, timing=replace(verdicts.timing, worked_s=self.worked_s))


async def test_a_shared_target_runs_none_for_others_wait() -> None:
    verifier = Shared()
    async with scheduling(FakeDrafter(0.0), verifier, draft_count=HEADS_COUNT) as (admission, scheduler):
        request = admission.admit(GenerationRequest(TokenIds(PROMPT), 600, ignore_end_tokens=True))
        await collect(submit(scheduler, request))
    asked = [bool(call[0].further_count) for call in verifier.calls]
    assert asked[1] and not any(asked[60:])


@pytest.mark.parametrize(
    ("cached", "claimed", "expected"),
    [
        ((DECODED_TOKENS, 0), 0, NONE_FURTHER),
        ((DECODED_TOKENS, 0), 1, NONE_FURTHER),
        ((DECODED_TOKENS, DECODED_TOKENS), 0, NEAR),
    ],
    ids=["it waits for the end of the round", "it is under way in another lane", "there is none"],
)
def test_none_begins_beside_a_prompt_of_another_group(
    cached: tuple[int, int], claimed: int, expected: FurtherCounts
) -> None:
    """One that was under way in another lane was not seen: each of its chunks waited for eight rounds."""
    scheduler = make_serving(FakeDrafter(0.0), WithHeads(), batch_size=2).scheduler
    group = [generation_of((7,) * (DECODED_TOKENS + 1), name=name) for name in ("one", "other")]
    for one, length in zip(group, cached, strict=True):
        one.target_cached_length = length
    scheduler.pool.adopt(group)
    scheduler.pool.claim([group[claimed]])
    assert scheduler.further_counts(group[:1]) == expected


class Older(WithHeads):
    """A target that does not know of further rounds."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        return await super().verify([replace(row, further_count=0) for row in rows], timeout_s)


async def test_an_older_target_gives_none() -> None:
    async with scheduling(FakeDrafter(0.0), Older(), draft_count=HEADS_COUNT) as (admission, scheduler):
        output, _ = await collect(submit(scheduler, admission.admit(GenerationRequest(TokenIds(PROMPT), 30))))
    assert output == continuation(PROMPT, 30)


ROW = VerifyRow("a", 4, (1,), (5,), propose_count=2, further_count=1)
FIRST = Verdict(1, 7, 6, draft_token_ids=(8, 9))


@pytest.mark.parametrize(
    "further",
    [
        (Verdict(2, 7, 9), Verdict(0, 7, 10)),
        (Verdict(3, 7, 10),),
        (Verdict(2, 7, 8),),
        (Verdict(2, VOCABULARY_SIZE, 9),),
        (Verdict(2, 7, 9, draft_token_ids=(1, 2, 3)),),
        (Verdict(2, 7, 9, reused_count=1),),
        (Verdict(2, 7, 9, further=(Verdict(0, 7, 10),)),),
    ],
    ids=["too many", "more accepted than drafted", "length", "token", "too many drafts", "reused", "of its own"],
)
def test_further_rounds_that_cannot_be_true_fail_the_peer(further: tuple[Verdict, ...]) -> None:
    check_verdicts(
        [ROW], Verdicts([replace(FIRST, further=(Verdict(2, 7, 9, draft_token_ids=(1,)),))]), VOCABULARY_SIZE
    )
    with pytest.raises(PeerFailed, match="cannot be true"):
        check_verdicts([ROW], Verdicts([replace(FIRST, further=further)]), VOCABULARY_SIZE)


def test_costs_see_two_verifies_in_the_time_of_both() -> None:
    one = generation_of()
    rows = [RowReport(20, 3, 4, DraftSource.SUFFIX, "", one)], [RowReport(3, 3, 4, DraftSource.HEADS, "", one)]
    amounts = dict(zip(TARGET_PARTS, RoundWork.of(report_of(*rows)).target_amounts(), strict=True))
    assert (amounts[CONSTANT], amounts[DRAFTED], amounts[HEADS_CALL], amounts[HEADS]) == (2, 23, 2, 6)
    assert amounts["over 16"] == 5 and amounts["cached"] == 2 * len(PROMPT)
    costs = CostCounts()
    costs.add(report_of(*rows), 1, 0.01)
    snapshot = costs.snapshot()
    assert [(call.call_count, call.drafted_count, call.executed_s, call.wire_s) for call in snapshot.calls] == [
        (1, 20, 0.004, 0.001)
    ]
    assert {one.source for one in snapshot.acceptances} == {DraftSource.SUFFIX, DraftSource.HEADS}


async def test_what_follows_the_end_of_an_output_takes_its_time_and_is_no_round() -> None:
    """All of a call's time was put down to the rounds before the end: passes seemed twice as long or more."""
    clock = Clock()
    verifier, one = Far(clock), generation_of(PROMPT, end_token_ids=frozenset(continuation(PROMPT, 1)))
    report = await run_round({one: Wish()}, {}, verifier, LIMITS, further=FurtherCounts(3, 3), clock=clock)
    assert one.ended and (report.pass_count, len(report.further)) == (4, 0)
    assert report.further_s == pytest.approx(3.0)
    amounts = dict(zip(TARGET_PARTS, RoundWork.of(report).target_amounts(), strict=True))
    assert (amounts[CONSTANT], amounts[HEADS_CALL]) == (4, 0)
    costs = CostCounts()
    costs.add(report, 1, report.duration_s)
    assert [call.executed_s for call in costs.snapshot().calls] == [1.0]


def test_statistics_count_them_as_rounds() -> None:
    statistics, row = Statistics(), RowReport(3, 2, 3, DraftSource.HEADS)
    statistics.count_report(report_of([row, row], [row]))
    statistics.count_round(group_size=2, batch_size=2, is_fallback=False, others_wait=False)
    snapshot = statistics.snapshot()
    assert (snapshot.round_count, snapshot.drafted_count, snapshot.committed_count) == (2, 9, 9)
    assert snapshot.round_counts_by_group_size == ((1, 1), (2, 1))


async def test_operators_see_how_many_there_are() -> None:
    registry = CollectorRegistry()
    async with scheduling(FakeDrafter(0.0), WithHeads(), draft_count=HEADS_COUNT, registry=registry) as running:
        admission, scheduler = running
        await collect(submit(scheduler, admission.admit(GenerationRequest(TokenIds(PROMPT), 40))))
        rounds = scheduler.statistics.snapshot().round_count
    further = registry.get_sample_value("paceline_further_rounds_total")
    assert further and further >= (rounds - 1) // 2


@pytest.mark.parametrize(("drafted", "least", "most"), [((8, 9), 0.9, 1.0), ((8, 1), 0.0, 0.1)])
def test_what_heads_are_worth_is_learned_from_further_rounds_too(
    drafted: tuple[int, ...], least: float, most: float
) -> None:
    acceptances, one = Acceptances(4, 2), generation_of()
    first = RowReport(0, 0, 1, None, "", one, (7,), HeadsDraft(9, drafted, 2))
    second = RowReport(2, 0, 1, DraftSource.HEADS, "", one, (8, 9, 4))
    for _ in range(60):
        acceptances.observe({one: Wish()}, report_of([first], [second]))
    assert least <= acceptances.expected_of_heads()[1] <= most


class Noting:
    """A source that notes which outputs ended."""

    def __init__(self) -> None:
        self.ended_count = 0

    def read(self, context: TokenList) -> None:
        pass

    def guess(self, context: TokenList, most: int) -> Guess:
        raise AssertionError("nobody asks")

    def ended(self, context: TokenList) -> None:
        self.ended_count += 1


@pytest.mark.parametrize("ends_further", [False, True])
def test_an_output_that_ended_is_learned_from_once(ends_further: bool) -> None:
    noting, one = Noting(), generation_of()
    one.guessers, one.ended = {DraftSource.SUFFIX: noting}, True
    first = RowReport(0, 0, 1, None, "", one, (7,), is_last=not ends_further)
    further = [RowReport(0, 0, 1, None, "", one, (8,), is_last=True)] if ends_further else []
    if ends_further:
        first.heads_draft = HeadsDraft(9, (8,), 1)
    Acceptances(4, 2).observe({one: Wish()}, report_of([first], further))
    assert noting.ended_count == 1
