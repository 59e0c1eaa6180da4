"""Drafts made ahead: they save drafting time in matching rounds, and change no output, cache or release."""

import asyncio
import gc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace

from coordinator.door.admission import Admission
from coordinator.drafting.ahead import PROBE_EVERY, AheadDrafter
from coordinator.protocols import Deadline
from coordinator.requests.generation import Generation
from coordinator.rounds.residency import Residency
from coordinator.wiring import Clocks
from paceline.checks import MAX_DRAFT_COUNT, MAX_PROPOSED_COUNT
from paceline.errors import PacelineError, PeerUnavailable
from paceline.types import GREEDY, GenerationRequest, Proposal, Proposals, ProposeRow, TokenIds, Verdicts, VerifyRow
from tests.coordinators import SERVED, make_serving, submit
from tests.fakes.fake_time import FakeTime
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation, next_token
from tests.spans import Spans

PATIENCE = Deadline()
PROMPT = (5, 6, 7)
VERIFY_S = 10.0


class TimedDrafter(FakeDrafter):
    """Serves one call after another, as a model service does; each takes `token_s` a draft token."""

    def __init__(self, time: FakeTime, skill: float, token_s: float = 1.0, seed: int = 0) -> None:
        super().__init__(skill, seed)
        self.running: list[str] = []
        """Sequence ids in calls under way."""
        self._time = time
        self._token_s = token_s
        self._line = asyncio.Lock()

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        names = [row.sequence_id for row in rows]
        self.running += names
        try:
            async with self._line:
                await self._time.sleep(self._token_s * max(row.draft_count for row in rows))
                return await super().propose(rows, deadline)
        finally:
            for name in names:
                self.running.remove(name)


class TimedVerifier(FakeVerifier):
    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self._time = time

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        await self._time.sleep(VERIFY_S)
        return await super().verify(rows, timeout_s)


async def outputs(
    time: FakeTime, drafter: TimedDrafter, counts: Sequence[int], *, lanes: int = 1, draft_count: int = 3
) -> list[list[int]]:
    """Serve a different prompt for each count of new tokens, all at once."""
    ahead = AheadDrafter(drafter, clock=time.clock)
    residency = Residency(ahead)
    scheduler = make_serving(
        ahead,
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
    await residency.close()
    assert drafter.token_ids == {}, "the draft holds what was freed"
    return [generation.token_ids[len(PROMPT) + 1 :] for generation in found]


@settings(max_examples=40)
@given(
    skill=st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    lanes=st.integers(1, 2),
    token_s=st.sampled_from((0.1, 2.0, 20.0)),
    draft_count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_outputs_are_the_targets_and_all_is_freed(
    skill: float, counts: list[int], lanes: int, token_s: float, draft_count: int, seed: int
) -> None:
    time = FakeTime()
    drafter = TimedDrafter(time, skill, token_s, seed)
    found = asyncio.run(time.run(outputs(time, drafter, counts, lanes=lanes, draft_count=draft_count)))
    assert found == [continuation((*PROMPT, number), count) for number, count in enumerate(counts)]


def whole_row(sequence_id: str, output_count: int, cached_length: int = 0, draft_count: int = 3) -> ProposeRow:
    """Return the row of a round after `output_count` of the target's own tokens."""
    token_ids = [*PROMPT, *continuation(PROMPT, output_count)]
    assert len(token_ids) == len(PROMPT) + output_count
    rule = None if cached_length else GREEDY
    return ProposeRow(sequence_id, cached_length, tuple(token_ids[cached_length:]), draft_count, rule)


async def drafts_of(drafter: AheadDrafter, row: ProposeRow) -> tuple[int, ...]:
    (result,) = (await drafter.propose([row], PATIENCE)).results
    assert not isinstance(result, PacelineError)
    return result.draft_token_ids


async def test_a_round_whose_drafts_were_all_accepted_has_the_next_ones_at_once() -> None:
    inner = FakeDrafter(skill=1.0)
    drafter = AheadDrafter(inner)
    truth = continuation(PROMPT, 8)
    assert await drafts_of(drafter, whole_row("a", 0)) == tuple(truth[:3])
    await asyncio.sleep(0)
    assert len(inner.calls) == 2
    # All three drafts were accepted and the target's own token was guessed; two drafts after it are cached.
    proposals = await drafter.propose([whole_row("a", 4, cached_length=5)], PATIENCE)
    assert proposals.results == [Proposal(tuple(truth[4:7]), cached_length=len(PROMPT) + 4 + 2)]
    assert proposals.timing.executed_s == 0
    assert inner.calls[1] == [ProposeRow("a", 5, (truth[2],), 4, rule=None)]
    await asyncio.sleep(0)
    assert [call[0].base_length for call in inner.calls] == [0, 5, 9], "it goes on from there, and asks nothing twice"


async def test_what_the_target_did_not_say_is_dropped() -> None:
    inner = FakeDrafter(skill=1.0)
    drafter = AheadDrafter(inner)
    truth = continuation(PROMPT, 8)
    await drafts_of(drafter, whole_row("a", 0))
    other = (truth[0] + 1) % 50
    row = ProposeRow("a", len(PROMPT), (other,), 3)
    expected: list[int] = []
    while len(expected) < 3:
        expected.append(next_token([*PROMPT, other, *expected]))
    assert await drafts_of(drafter, row) == tuple(expected)
    assert inner.token_ids["a"][: len(PROMPT) + 1] == [*PROMPT, other]


async def test_fewer_drafts_than_were_made_ahead_are_given_when_fewer_are_wanted() -> None:
    drafter = AheadDrafter(FakeDrafter(skill=1.0))
    truth = continuation(PROMPT, 8)
    await drafts_of(drafter, whole_row("a", 0))
    assert await drafts_of(drafter, whole_row("a", 4, cached_length=5, draft_count=1)) == (truth[4],)


@pytest.mark.review
async def test_no_more_is_asked_ahead_than_a_draft_service_makes() -> None:
    """Review B10: at most the drafts of a round, and a guess before them."""
    inner = FakeDrafter(skill=1.0)
    await drafts_of(AheadDrafter(inner), whole_row("a", 0, draft_count=MAX_DRAFT_COUNT))
    await asyncio.sleep(0)
    assert [call[0].draft_count for call in inner.calls] == [MAX_DRAFT_COUNT, MAX_PROPOSED_COUNT]


async def test_nothing_is_asked_ahead_while_another_sequence_may_want_the_draft() -> None:
    inner = FakeDrafter(skill=1.0)
    drafter = AheadDrafter(inner)
    await drafter.propose([whole_row("a", 0), whole_row("b", 0)], PATIENCE)
    await drafts_of(drafter, whole_row("a", 4, cached_length=5))
    await asyncio.sleep(0)
    assert len(inner.calls) == 2
    await drafter.release(["b"])
    await drafts_of(drafter, whole_row("a", 5, cached_length=7))
    await asyncio.sleep(0)
    assert len(inner.calls) == 4


async def test_a_sequence_is_freed_after_what_was_asked_ahead_for_it() -> None:
    time = FakeTime()

    async def ask_and_free() -> None:
        inner = TimedDrafter(time, skill=1.0)
        drafter = AheadDrafter(inner, clock=time.clock)
        await drafts_of(drafter, whole_row("a", 0))
        await asyncio.sleep(0)
        assert inner.running == ["a"]
        await drafter.release(["a"])
        assert inner.running == []
        assert inner.token_ids == {}

    await time.run(ask_and_free())


def fail_second(number: int) -> None:
    """Fail the second call, which is the one ahead."""
    if number == 2:
        raise PeerUnavailable("gone")


def break_second(number: int) -> None:
    if number == 2:
        raise RuntimeError("broken")


@pytest.mark.review
@pytest.mark.parametrize("before", [fail_second, break_second])
async def test_a_failure_ahead_costs_a_call_and_nothing_else(before: Callable[[int], None]) -> None:
    """Review C15: an unforeseen failure was raised in the next round."""
    inner = FakeDrafter(skill=1.0, before=before)
    drafter = AheadDrafter(inner)
    truth = continuation(PROMPT, 8)
    await drafts_of(drafter, whole_row("a", 0))
    assert await drafts_of(drafter, whole_row("a", 4, cached_length=5)) == tuple(truth[4:7])
    assert [call[0].base_length for call in inner.calls] == [0, 5, 5]


async def test_a_failure_ahead_that_nobody_asks_after_any_more_is_no_complaint_of_the_loop() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    drafter = AheadDrafter(FakeDrafter(skill=1.0, before=fail_second))
    await drafts_of(drafter, whole_row("a", 0))
    await drafter.release(["a"])
    gc.collect()
    assert not complaints


async def test_a_call_ahead_has_a_trace_of_its_own_that_links_its_round() -> None:
    spans = Spans()
    round_ids: list[trace.SpanContext] = []
    inner = FakeDrafter(skill=1.0, before=lambda _: round_ids.append(trace.get_current_span().get_span_context()))
    drafter = AheadDrafter(inner, spans.tracer)
    with spans.tracer.start_as_current_span("round") as around:
        await drafts_of(drafter, whole_row("a", 0))
        await asyncio.sleep(0)
    (ahead,) = spans("draft_ahead")
    own = around.get_span_context()
    assert ahead.parent_id is None
    assert [(one.trace_id, one.span_id) for one in ahead.links] == [(f"{own.trace_id:032x}", f"{own.span_id:016x}")]
    assert [f"{one.span_id:016x}" for one in round_ids] == [f"{own.span_id:016x}", ahead.span_id]


@pytest.mark.parametrize("before", [fail_second, break_second])
async def test_a_call_ahead_that_fails_leaves_no_message_in_its_span(before: Callable[[int], None]) -> None:
    spans = Spans()
    drafter = AheadDrafter(FakeDrafter(skill=1.0, before=before), spans.tracer)
    with spans.tracer.start_as_current_span("shared_round"):
        await drafts_of(drafter, whole_row("a", 0))
        await drafter.release(["a"])
    (ahead,) = spans("draft_ahead")
    assert ahead.events == ()


async def test_nothing_is_asked_ahead_beyond_the_drafts_length() -> None:
    inner = FakeDrafter(skill=1.0)
    drafter = AheadDrafter(inner)
    # Three drafts follow the prompt, then a guess and three more: the last of them is not cached.
    inner.max_length = len(PROMPT) + 3 + 4 - 1
    await drafts_of(drafter, whole_row("a", 0))
    await asyncio.sleep(0)
    assert len(inner.calls) == 2
    await drafter.release(["a"])
    inner.max_length -= 1
    await drafts_of(drafter, whole_row("b", 0))
    await asyncio.sleep(0)
    assert len(inner.calls) == 3


async def test_a_draft_that_is_never_right_is_hardly_asked_ahead() -> None:
    time = FakeTime()
    drafter = TimedDrafter(time, skill=0.0)
    (found,) = await time.run(outputs(time, drafter, [40]))
    assert found == continuation((*PROMPT, 0), 40)
    ahead = [row for (row,) in drafter.calls if row.draft_count == 4]
    until_known = 2 * PROBE_EVERY
    assert len(ahead) <= until_known + len(drafter.calls) / PROBE_EVERY


async def test_rounds_take_the_verify_alone_while_all_drafts_fit() -> None:
    time = FakeTime()
    (found,) = await time.run(outputs(time, TimedDrafter(time, skill=1.0), [24], draft_count=3))
    assert found == continuation((*PROMPT, 0), 24)
    rounds = len(found) / 4
    drafting_s = 3.0  # of the first round
    assert time.now_s <= drafting_s + VERIFY_S * (rounds + 1)
