"""Prepared rounds at the coordinator: a hit needs no hop, and no output, cache or release changes."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace

from coordinator.door.admission import Admission
from coordinator.drafting.answered import Answered
from coordinator.drafting.prepared import PreparedDrafter
from coordinator.drafting.prepared_choices import MOST_CHOICES, PreparedChoices
from coordinator.drafting.preparing_worth import BLOCK, PreparingWorth
from coordinator.protocols import Deadline
from coordinator.requests.generation import Generation
from coordinator.rounds.residency import Residency
from coordinator.rounds.round import RoundLimits, run_round
from coordinator.wiring import Clocks
from paceline.errors import PacelineError, PeerUnavailable
from paceline.prefix_hash import extended_hash
from paceline.types import (
    GREEDY,
    CallTiming,
    GenerationRequest,
    PreparedDrafts,
    Proposal,
    Proposals,
    ProposeRow,
    TokenIds,
    Verdicts,
    VerifyRow,
)
from tests.coordinators import MODEL, SERVED, asking, make_serving, submit
from tests.fakes.fake_time import FakeTime
from tests.fakes.model_services import (
    CHUNK_TOKENS,
    VOCABULARY_SIZE,
    FakeDrafter,
    FakeVerifier,
    continuation,
    next_token,
)
from tests.generations import generation_of
from tests.spans import Spans

PATIENCE = Deadline()
PROMPT = (5, 6, 7)
VERIFY_S = 10.0
HOP_S = 4.0


def draft_choice(prefix: Sequence[int], skill: float) -> int:
    """Return the choice of a draft that agrees with the target with probability `skill`, the same every time."""
    right = next_token(prefix)
    return right if next_token(prefix, 99) < skill * VOCABULARY_SIZE else (right + 1) % VOCABULARY_SIZE


def choices_after(prefix: Sequence[int], count: int, skill: float) -> tuple[int, ...]:
    found: list[int] = []
    while len(found) < count:
        found.append(draft_choice([*prefix, *found], skill))
    return tuple(found)


class PreparingDrafter(FakeDrafter):
    """Serves one call after another. After each it tells drafts for some outcomes, as a model service does.

    The target's own next token is among them, for each accepted count.
    """

    def __init__(
        self,
        time: FakeTime,
        skill: float,
        *,
        hop_s: float = HOP_S,
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(skill, before=before)
        self.skill = skill
        self.deep_count = 6
        """Drafts told after an outcome."""
        self._time = time
        self._hop_s = hop_s
        self._telling: set[asyncio.Task[None]] = set()

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        await self._time.sleep(self._hop_s / 2)
        answer = await super().propose(rows, deadline)
        found: list[PreparedDrafts] = []
        for row, result in zip(rows, answer.results, strict=True):
            if row.prepare_count and isinstance(result, Proposal):
                found += self.prepared(row, result)
        telling = asyncio.create_task(self._tell(found))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        await self._time.sleep(self._hop_s / 2)
        return answer

    def prepared(self, row: ProposeRow, result: Proposal) -> list[PreparedDrafts]:
        """Return drafts after outcomes of the row's drafts."""
        drafts = result.draft_token_ids
        start = row.base_length + len(row.token_ids)
        committed = self.token_ids[row.sequence_id][:start]
        found: list[PreparedDrafts] = []
        for accepted in range(len(drafts) + 1):
            prefix = [*committed, *drafts[:accepted]]
            for token_id in {next_token(prefix), draft_choice(prefix, self.skill)}:
                after = [*prefix, token_id]
                told = choices_after(after, self.deep_count, self.skill)
                found.append(PreparedDrafts(row.sequence_id, len(after), extended_hash(0, after), told))
        return found

    async def _tell(self, found: list[PreparedDrafts]) -> None:
        await self._time.sleep(self._hop_s / 2 + 0.5)
        self.take_prepared(found)

    def _propose(self, row: ProposeRow) -> Proposal | PacelineError:
        try:
            prefix = self.append(row, row.token_ids)
        except PacelineError as error:
            return error
        drafts = () if row.following_count else choices_after(prefix, row.draft_count, self.skill)
        prefix += drafts[:-1]
        return Proposal(drafts, len(prefix))


class TimedVerifier(FakeVerifier):
    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self._time = time

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await self._time.sleep(VERIFY_S)
        ids = range(VOCABULARY_SIZE)
        assert all(one in ids for row in rows for one in row.draft_token_ids), "a target refuses such rows"
        return await super().verify(rows, timeout_s)


async def outputs(
    time: FakeTime,
    drafter: PreparingDrafter,
    counts: Sequence[int],
    *,
    lanes: int = 1,
    draft_count: int = 3,
    prepared: PreparedDrafter | None = None,
) -> list[list[int]]:
    """Serve a different prompt for each count of new tokens, all at once."""
    prepared = prepared or prepared_of(time, drafter)
    residency = Residency(prepared)
    scheduler = make_serving(
        prepared,
        TimedVerifier(time),
        draft_count=draft_count,
        lanes=lanes,
        residency=residency,
        clocks=Clocks(time.clock),
    ).scheduler
    rounds = asyncio.create_task(scheduler.run())
    admission = Admission(SERVED, default_max_new_tokens=40)
    found: list[Generation] = []
    for number, count in enumerate(counts):
        found += submit(scheduler, admission.admit(GenerationRequest(TokenIds((*PROMPT, number)), count))).generations
    for generation in found:
        while not generation.ended:
            await time.sleep(1.0)
    rounds.cancel()
    await asyncio.wait([rounds])
    closing = asyncio.create_task(residency.close())
    while not closing.done():
        await time.sleep(1.0)
    assert drafter.token_ids == {}, "the draft holds what was freed"
    return [generation.token_ids[len(PROMPT) + 1 :] for generation in found]


@settings(max_examples=30)
@given(
    skill=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    lanes=st.integers(1, 2),
    hop_s=st.sampled_from((0.1, 4.0, 50.0)),
    draft_count=st.integers(1, 5),
)
def test_outputs_are_the_targets_and_all_is_freed(
    skill: float, counts: list[int], lanes: int, hop_s: float, draft_count: int
) -> None:
    time = FakeTime()
    drafter = PreparingDrafter(time, skill, hop_s=hop_s)
    found = asyncio.run(time.run(outputs(time, drafter, counts, lanes=lanes, draft_count=draft_count)))
    assert found == [continuation((*PROMPT, number), count) for number, count in enumerate(counts)]


async def test_rounds_take_the_verify_alone_while_outcomes_are_prepared() -> None:
    time = FakeTime()
    drafter = PreparingDrafter(time, 1.0)
    (found,) = await time.run(outputs(time, drafter, [24]))
    assert found == continuation((*PROMPT, 0), 24)
    rounds = len(found) / 4
    assert time.now_s <= HOP_S + VERIFY_S * (rounds + 1)
    assert len(drafter.calls) >= rounds - 1, "the service is told of every round"


def whole_row(sequence_id: str, output_count: int, cached_length: int = 0, draft_count: int = 3) -> ProposeRow:
    """Return the row of a round after `output_count` of the target's own tokens."""
    token_ids = [*PROMPT, *continuation(PROMPT, output_count)]
    rule = None if cached_length else GREEDY
    base_hash = extended_hash(0, token_ids[:cached_length])
    return ProposeRow(
        sequence_id, cached_length, tuple(token_ids[cached_length:]), draft_count, rule, base_hash=base_hash
    )


def prepared_of(time: FakeTime, drafter: PreparingDrafter) -> PreparedDrafter:
    found = PreparedDrafter(drafter, clock=time.clock)
    drafter.listen(found.take)
    return found


async def proposal_of(drafter: PreparedDrafter, row: ProposeRow) -> Proposal:
    (result,) = (await drafter.propose([row], PATIENCE)).results
    assert isinstance(result, Proposal)
    return result


def is_ready(drafter: PreparedDrafter, row: ProposeRow) -> bool:
    """Return whether all drafts of a row are there now."""
    return len(drafter._choices.drafts(row)) == row.draft_count


async def test_a_round_tells_how_long_it_waited_for_drafts_that_were_prepared() -> None:
    """For the prices of `auto`: a call took longer, and nobody waited for it."""
    time = FakeTime()

    async def rounds() -> list[float | None]:
        drafter, verifier = prepared_of(time, PreparingDrafter(time, 1.0)), TimedVerifier(time)
        group = [generation_of(PROMPT, name=name) for name in "ab"]
        limits = RoundLimits(vocabulary_size=VOCABULARY_SIZE, prefill_chunk_tokens=CHUNK_TOKENS)
        found = list[float | None]()
        for _ in range(3):
            report = await run_round(asking(group, [3, 3]), {MODEL: drafter}, verifier, limits, clock=time.clock)
            found.append(report.draft_calls[MODEL].prepared_wait_s)
        return found

    assert await time.run(rounds()) == [None, 0.0, 0.0]


async def test_a_hit_is_answered_at_once_and_the_service_is_told_in_order() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = prepared_of(time, inner)
        truth = continuation(PROMPT, 8)
        await proposal_of(drafter, whole_row("a", 0))
        assert not is_ready(drafter, whole_row("a", 4, cached_length=5))
        await time.sleep(VERIFY_S)
        assert is_ready(drafter, whole_row("a", 4, cached_length=5))
        began_s = time.now_s
        found = await proposal_of(drafter, whole_row("a", 4, cached_length=5))
        assert time.now_s == began_s
        assert found == Proposal(tuple(truth[4:7]), cached_length=len(PROMPT) + 4 + 2, prepared=True)
        await time.sleep(VERIFY_S)
        assert [call[0].base_length for call in inner.calls] == [0, 5]
        assert [call[0].draft_count for call in inner.calls] == [3, 3]
        assert (drafter.row_count, drafter.hit_count) == (1, 1)

    await time.run(rounds())


async def test_where_nothing_may_be_prepared_each_round_waits_for_a_call_that_asks_for_drafts_alone() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = PreparedDrafter(inner, clock=time.clock, may_prepare=False)
        inner.listen(drafter.take)
        for row in (whole_row("a", 0), whole_row("a", 4, cached_length=5)):
            began_s = time.now_s
            assert not (await proposal_of(drafter, row)).prepared
            assert time.now_s == began_s + HOP_S
            await time.sleep(VERIFY_S)
        assert [call[0].prepare_count for call in inner.calls] == [0, 0]
        assert (drafter.row_count, drafter.hit_count) == (0, 0)

    await time.run(rounds())


async def test_a_group_that_lacks_many_drafts_is_asked_for_in_one_call() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = prepared_of(time, inner)
        await drafter.propose([whole_row(one, 0) for one in "abc"], PATIENCE)
        await time.sleep(VERIFY_S)
        drafter._choices.forget(["a", "c"])
        rows = [whole_row(one, 4, cached_length=5) for one in "abc"]
        found = (await drafter.propose(rows, PATIENCE)).results
        assert [isinstance(one, Proposal) and len(one.draft_token_ids) for one in found] == [3, 3, 3]
        assert [tuple(row.sequence_id for row in call) for call in inner.calls[1:]] == [("a", "b", "c")]

    await time.run(rounds())


async def test_a_row_without_drafts_does_not_keep_a_group_from_going_on() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0, hop_s=50.0)
        drafter = prepared_of(time, inner)
        await drafter.propose([whole_row(one, 0) for one in "abc"], PATIENCE)
        await time.sleep(50.0)
        drafter._choices.forget(["b"])
        began_s = time.now_s
        rows = [whole_row(one, 4, cached_length=5) for one in "abc"]
        first, none, _ = (await drafter.propose(rows, PATIENCE)).results
        assert time.now_s == began_s
        assert isinstance(first, Proposal)
        assert len(first.draft_token_ids) == 3
        assert none == Proposal((), len(PROMPT) + 4)
        drafter.owe(["a", "b", "c"])
        await drafter.release()
        assert [row.draft_count for row in inner.calls[-1]] == [3, 3, 3]

    await time.run(rounds())


async def test_drafts_that_are_told_before_the_answer_comes_are_used() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0, hop_s=20.0)
        drafter = prepared_of(time, inner)
        await proposal_of(drafter, whole_row("a", 0))
        began_s = time.now_s
        found = await proposal_of(drafter, whole_row("a", 4, cached_length=5))
        assert found.prepared
        assert time.now_s - began_s < 1
        drafter.owe(["a"])
        await drafter.release()
        assert inner.token_ids == {}

    await time.run(rounds())


async def test_fewer_drafts_than_were_prepared_are_given_when_fewer_are_wanted() -> None:
    time = FakeTime()

    async def rounds() -> None:
        drafter = prepared_of(time, PreparingDrafter(time, 1.0))
        await proposal_of(drafter, whole_row("a", 0))
        await time.sleep(VERIFY_S)
        found = await proposal_of(drafter, whole_row("a", 4, cached_length=5, draft_count=1))
        assert found.draft_token_ids == (continuation(PROMPT, 5)[4],)

    await time.run(rounds())


async def test_a_row_that_has_half_of_its_drafts_does_not_wait_long_for_more() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        inner.deep_count = 2
        drafter = prepared_of(time, inner)
        await proposal_of(drafter, whole_row("a", 0, draft_count=5))
        await time.sleep(VERIFY_S)
        # Two drafts are known after the longest outcome, which is two tokens longer than this one.
        assert not is_ready(drafter, whole_row("a", 4, cached_length=5, draft_count=9))
        assert len((await proposal_of(drafter, whole_row("a", 4, cached_length=5, draft_count=8))).draft_token_ids) == 4

    await time.run(rounds())


async def test_a_sequence_is_freed_after_the_calls_in_the_background() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = prepared_of(time, inner)
        await proposal_of(drafter, whole_row("a", 0))
        await time.sleep(VERIFY_S)
        # Whole, so that the service would take it after the end of the sequence too.
        assert (await proposal_of(drafter, whole_row("a", 4))).prepared
        drafter.owe(["a"])
        await drafter.release()
        assert inner.token_ids == {}
        await time.sleep(VERIFY_S)
        assert inner.token_ids == {}
        assert not is_ready(drafter, whole_row("a", 8, cached_length=9)), "what comes late is for nobody"

    await time.run(rounds())


async def test_a_sequence_that_is_used_again_before_the_calls_in_the_background_are_over_is_not_freed() -> None:
    """A draft service without room had a resting sequence left, which went on before its last call was answered."""
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = prepared_of(time, inner)
        await proposal_of(drafter, whole_row("a", 0))
        await time.sleep(VERIFY_S)
        assert (await proposal_of(drafter, whole_row("a", 4, cached_length=5))).prepared
        drafter.owe(["a"])
        resumed = asyncio.create_task(proposal_of(drafter, whole_row("a", 8)))
        await time.sleep(HOP_S / 4)
        await drafter.release()
        await resumed
        await drafter.release()
        assert inner.token_ids.keys() == {"a"}
        await proposal_of(drafter, whole_row("a", 9, cached_length=11))
        drafter.owe(["a"])
        await drafter.release()
        assert inner.token_ids == {}

    await time.run(rounds())


async def test_a_round_that_is_cancelled_cancels_its_call() -> None:
    time = FakeTime()

    async def rounds() -> None:
        inner = PreparingDrafter(time, 1.0)
        drafter = prepared_of(time, inner)
        asking = asyncio.create_task(proposal_of(drafter, whole_row("a", 0)))
        await time.sleep(HOP_S / 4)
        asking.cancel()
        await asyncio.wait([asking])
        await time.sleep(HOP_S)
        assert inner.calls == []

    await time.run(rounds())


async def test_what_a_call_in_the_background_answers_is_used() -> None:
    time = FakeTime()

    async def rounds() -> None:
        drafter = prepared_of(time, PreparingDrafter(time, 1.0, hop_s=50.0))
        await drafter.propose([whole_row(one, 0) for one in "ab"], PATIENCE)
        await time.sleep(50.0)
        drafter._choices.forget(["b"])
        rows = [whole_row(one, 4, cached_length=5) for one in "ab"]
        _, none = (await drafter.propose(rows, PATIENCE)).results
        assert none == Proposal((), len(PROMPT) + 4)
        await time.sleep(51.0)
        assert (await proposal_of(drafter, rows[1])).prepared

    await time.run(rounds())


def fail_second(number: int) -> None:
    """Fail the second call, which is the one in the background."""
    if number == 2:
        raise PeerUnavailable("gone")


def break_second(number: int) -> None:
    if number == 2:
        raise RuntimeError("broken")


@pytest.mark.parametrize("before", [fail_second, break_second])
async def test_a_call_in_the_background_that_fails_costs_its_drafts_and_nothing_else(
    before: Callable[[int], None],
) -> None:
    time = FakeTime()

    async def rounds() -> None:
        drafter = prepared_of(time, PreparingDrafter(time, 1.0, before=before))
        await proposal_of(drafter, whole_row("a", 0))
        await time.sleep(VERIFY_S)
        assert (await proposal_of(drafter, whole_row("a", 4, cached_length=5))).prepared
        await time.sleep(VERIFY_S)
        assert not is_ready(drafter, whole_row("a", 5, cached_length=7))
        # The service never had the row, and says so: the round sends the sequence whole.
        assert not (await proposal_of(drafter, whole_row("a", 8))).prepared

    await time.run(rounds())


class ChunkedDrafter(PreparingDrafter):
    """Takes in so many tokens of a row in a call."""

    def __init__(self, time: FakeTime, chunk_tokens: int) -> None:
        super().__init__(time, 1.0)
        self._chunk_tokens = chunk_tokens

    def _propose(self, row: ProposeRow) -> Proposal | PacelineError:
        chunk = row.token_ids[: self._chunk_tokens]
        left_count = len(row.token_ids) - len(chunk)
        return super()._propose(replace(row, token_ids=chunk, following_count=row.following_count + left_count))


@pytest.mark.parametrize("chunk_tokens", [16, 1000])
async def test_a_sequence_that_its_draft_service_loses_has_drafts_again_while_others_are_answered_at_once(
    chunk_tokens: int,
) -> None:
    """Its rows were answered early too, and refused unseen: it had no drafts any more, while the others had theirs."""
    time = FakeTime()
    drafter = ChunkedDrafter(time, chunk_tokens)
    prepared = prepared_of(time, drafter)

    async def generations() -> list[Generation]:
        scheduler = make_serving(
            prepared, TimedVerifier(time), draft_count=3, lanes=1, batch_size=4, clocks=Clocks(time.clock)
        ).scheduler
        admission = Admission(SERVED, default_max_new_tokens=40)
        found: list[Generation] = []
        for number in range(4):
            request = GenerationRequest(TokenIds((*PROMPT, number)), 400, ignore_end_tokens=True)
            found += submit(scheduler, admission.admit(request)).generations
        rounds = asyncio.create_task(scheduler.run())
        while len(found[-1].token_ids) < 150:
            await time.sleep(1.0)
        drafter.token_ids.pop(found[0].sequence_id)
        while not all(one.ended for one in found):
            await time.sleep(1.0)
        rounds.cancel()
        await asyncio.wait([rounds])
        return found

    lost, *others = await time.run(generations())
    assert lost.token_ids[4:] == continuation((*PROMPT, 0), 400)
    most = max(one.usage.drafted_count for one in others)
    missed_count = 3 * (2 + 150 // chunk_tokens + 2)  # until it is known, and while its chunks are taken in
    assert lost.usage.drafted_count >= most - missed_count
    assert prepared.hit_count > 0.8 * prepared.row_count


async def test_a_call_in_the_background_has_a_trace_of_its_own_that_links_its_round() -> None:
    time, spans = FakeTime(), Spans()

    async def rounds() -> trace.Span:
        drafter = PreparedDrafter(inner := PreparingDrafter(time, 1.0), time.clock, spans.tracer)
        inner.listen(drafter.take)
        await proposal_of(drafter, whole_row("a", 0))
        await time.sleep(VERIFY_S)
        with spans.tracer.start_as_current_span("round") as around:
            await proposal_of(drafter, whole_row("a", 4, cached_length=5))
            await time.sleep(VERIFY_S)
        return around

    own = (await time.run(rounds())).get_span_context()
    (told,) = spans("draft_told")
    assert told.parent_id is None
    assert [(one.trace_id, one.span_id) for one in told.links] == [(f"{own.trace_id:032x}", f"{own.span_id:016x}")]


def test_choices_are_found_in_whatever_pieces_they_came() -> None:
    choices = PreparedChoices()
    choices.expect("a")
    row = ProposeRow("a", 2, (3, 4), 5, base_hash=extended_hash(0, (1, 2)))
    for prefix, told in (((1, 2, 3, 4), (5, 6)), ((1, 2, 3, 4, 5, 6), (7,)), ((1, 2, 3, 4, 9), (8,))):
        choices.add(PreparedDrafts("a", len(prefix), extended_hash(0, prefix), told))
    assert choices.drafts(row) == (5, 6, 7)
    assert choices.drafts(ProposeRow("a", 2, (3, 4, 5), 5, base_hash=row.base_hash)) == (6, 7)
    assert choices.drafts(ProposeRow("a", 2, (3, 4, 9), 5, base_hash=row.base_hash)) == (8,)
    assert choices.drafts(ProposeRow("b", 2, (3, 4), 5, base_hash=row.base_hash)) == ()
    assert choices.drafts(ProposeRow("a", 2, (3, 4), 5, following_count=1, base_hash=row.base_hash)) == ()


def test_a_peer_that_tells_without_end_fills_no_memory() -> None:
    choices = PreparedChoices()
    choices.expect("a")
    for number in range(3 * MOST_CHOICES):
        choices.add(PreparedDrafts("a", number, number, (1,)))
        choices.add(PreparedDrafts("unknown", number, number, (1,)))
    assert [len(one) for one in choices._choices.values()] == [MOST_CHOICES]


def begun_alike(worth: PreparingWorth, rows: Sequence[ProposeRow], now_s: float) -> bool:
    """Begin a round that is to give as many tokens a row as all others; return whether it prepares."""
    begun = worth.begin(rows, now_s)
    worth.answered(begun, 4.0 * len(rows))
    return begun.prepares


@pytest.mark.parametrize(("with_s", "without_s"), [(10.0, 20.0), (20.0, 10.0)])
@pytest.mark.parametrize("size", [1, 8])
def test_the_faster_kind_of_rounds_is_found_and_trials_cost_less_than_a_hundredth(
    with_s: float, without_s: float, size: int
) -> None:
    worth, now_s, kinds = PreparingWorth(), 0.0, list[bool]()
    rows = [whole_row(str(n), 4, cached_length=5) for n in range(size)]
    for _ in range(6000):
        kinds.append(begun_alike(worth, rows, now_s))
        now_s += with_s if kinds[-1] else without_s
    best = with_s < without_s
    settled = kinds[6 * BLOCK :]
    assert 0 < settled.count(not best) < 0.01 * len(settled)


@pytest.mark.parametrize(("with_tokens", "with_s", "pays"), [(2.0, 10.0, False), (3.0, 15.0, False), (3.0, 10.0, True)])
def test_rounds_are_compared_by_what_they_give_and_not_by_how_short_they_are(
    with_tokens: float, with_s: float, pays: bool
) -> None:
    # Rounds without take 16 and give 4: shorter rounds with few drafts are no gain.
    worth, now_s, kinds = PreparingWorth(), 0.0, list[bool]()
    rows = [whole_row("a", 4, cached_length=5)]
    for _ in range(2000):
        begun = worth.begin(rows, now_s)
        kinds.append(begun.prepares)
        worth.answered(begun, with_tokens if kinds[-1] else 4.0)
        now_s += with_s if kinds[-1] else 16.0
    settled = kinds[6 * BLOCK :]
    assert settled.count(pays) > 0.95 * len(settled)


def test_groups_of_another_size_do_what_pays_until_they_have_measured_it() -> None:
    worth, now_s, kinds = PreparingWorth(), 0.0, list[bool]()
    for size, rounds in ((8, 10 * BLOCK), (2, 4 * BLOCK)):
        rows = [whole_row(f"{size}-{n}", 4, cached_length=5) for n in range(size)]
        for _ in range(rounds):
            kinds.append(begun_alike(worth, rows, now_s))
            now_s += 20.0 if kinds[-1] else 10.0
    assert not any(kinds[10 * BLOCK :])


@pytest.mark.parametrize(("with_s", "pays"), [(20.0, False), (8.0, True)])
def test_the_better_kind_is_found_though_each_round_asks_for_other_rows(with_s: float, pays: bool) -> None:
    # Where rows have other sources too, hardly any group asks twice in the same composition.
    worth, now_s, kinds, numbers = PreparingWorth(), 0.0, list[bool](), random.Random(1)
    rows = [whole_row(str(n), 4, cached_length=5) for n in range(8)]
    for _ in range(60 * BLOCK):
        asked = numbers.sample(rows, numbers.randint(1, 8))
        kinds.append(begun_alike(worth, asked, now_s))
        now_s += with_s if kinds[-1] else 10.0
    settled = kinds[12 * BLOCK :]
    assert settled.count(pays) > 0.85 * len(settled)


def test_what_later_rows_bring_tells_how_often_drafts_are_accepted() -> None:
    always, never = Answered(), Answered()
    for length in range(0, 600, 6):
        for answered, brought in ((always, 6), (never, 1)):
            row = ProposeRow("a", length, (1,) * brought, 5)
            answered.asked([row])
            answered.answered([replace(row, base_length=length + 6 - brought)], [5])
    assert always.tokens(5) > 5.5
    assert never.tokens(5) < 1.5
    assert never.tokens(0) == always.tokens(0) == 1


def test_a_wrong_first_measurement_is_soon_corrected() -> None:
    # Rounds without were slow while services warmed up, and are the faster ones ever since.
    worth, now_s, kinds = PreparingWorth(), 0.0, list[bool]()
    rows = [whole_row("a", 4, cached_length=5)]
    for number in range(40 * BLOCK):
        kinds.append(begun_alike(worth, rows, now_s))
        now_s += 10.0 if kinds[-1] else 40.0 if number < 8 * BLOCK else 6.0
    assert kinds[16 * BLOCK :].count(True) < 2.5 * BLOCK


@pytest.mark.parametrize(
    ("way_s", "has_room", "is_tried"), [(1.0, False, False), (8.0, False, True), (1.0, True, True)]
)
def test_nothing_is_prepared_on_cores_of_a_target_that_is_near(way_s: float, has_room: bool, is_tried: bool) -> None:
    """Each trial made rounds longer: 6 of 100 rounds at B = 1 were trials, of twice the time."""
    worth, now_s, kinds = PreparingWorth(lambda: has_room), 0.0, list[bool]()
    rows = [whole_row("a", 4, cached_length=5)]
    for _ in range(100 * BLOCK):
        kinds.append(begun_alike(worth, rows, now_s))
        worth.called(rows, way_s + 3.0, CallTiming(executed_s=3.0))
        now_s += 7.0 if kinds[-1] else 10.0
    assert any(kinds) is is_tried
    assert kinds[50 * BLOCK :].count(is_tried) > 0.9 * 50 * BLOCK


def test_slow_rounds_at_the_start_decide_nothing() -> None:
    worth, now_s, kinds = PreparingWorth(), 0.0, list[bool]()
    rows = [whole_row("a", 4, cached_length=5)]
    for number in range(20 * BLOCK):
        kinds.append(begun_alike(worth, rows, now_s))
        now_s += 50.0 if number < BLOCK else 10.0 if kinds[-1] else 14.0
    assert kinds[6 * BLOCK :].count(False) <= BLOCK  # a trial


async def test_parts_of_prompts_are_no_rounds_and_nothing_is_prepared_after_them() -> None:
    """They go to the draft service beside a round, so their times would be taken for a round's."""
    time = FakeTime()
    inner, part = PreparingDrafter(time, 1.0), ProposeRow("one", 0, PROMPT, 1, following_count=4)
    prepared = PreparedDrafter(inner, clock=time.clock)

    async def take_in() -> None:
        await prepared.propose([part], PATIENCE)
        await prepared.propose([replace(part, base_length=len(PROMPT), following_count=1)], PATIENCE)

    await time.run(take_in())
    assert [row.prepare_count for call in inner.calls for row in call] == [0, 0]
    assert prepared.row_count == 0
