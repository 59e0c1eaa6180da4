"""What a client is told of its rounds, and how much of its prompt was cached."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.replicas.plausibility import check_proposals, check_verdicts
from coordinator.requests.generation import Request
from coordinator.requests.stream import Stream
from coordinator.rounds.round import RoundLimits, run_round
from paceline.errors import PeerFailed
from paceline.types import (
    CallTiming,
    DraftSource,
    GenerationRequest,
    HopTime,
    OutputPiece,
    OutputToken,
    Prefilled,
    Proposal,
    Proposals,
    ProposeRow,
    RoundSummary,
    TokenIds,
    TokenLogprobs,
    Usage,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)
from tests.coordinators import MODEL, asking, scheduling, submit
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, Clock, FakeDrafter, FakeVerifier, continuation
from tests.generations import generation_of

LIMITS = RoundLimits(vocabulary_size=VOCABULARY_SIZE, prefill_chunk_tokens=CHUNK_TOKENS)
PROMPT = (5, 6, 7)


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
async def test_the_rounds_told_add_up_to_the_usage(skill: float) -> None:
    async with scheduling(FakeDrafter(skill), FakeVerifier()) as (admission, scheduler):
        request = submit(scheduler, admission.admit(GenerationRequest(TokenIds(PROMPT), 30, tell_rounds=True)))
        pieces = [piece async for piece in request.stream.pieces()]
    assert [one.token_id for piece in pieces for one in piece.tokens] == continuation(PROMPT, 30)
    rounds = [piece.round for piece in pieces if piece.round]
    finish = pieces[-1].finish
    assert finish and len(rounds) == len(pieces) == finish.usage.round_count
    assert sum(one.drafted_count for one in rounds) == finish.usage.drafted_count
    assert sum(one.accepted_count for one in rounds) == finish.usage.accepted_count
    for piece in pieces:
        assert piece.round and piece.round.accepted_count == sum(token.accepted for token in piece.tokens)
        assert (piece.round.source is DraftSource.DRAFT) == bool(piece.round.drafted_count)


async def test_a_round_is_told_as_it_was_and_only_to_those_who_ask() -> None:
    clock = Clock()
    asked, silent = generation_of(request=Request(tells_rounds=True)), generation_of()
    silent.sequence_id = "other"
    for one in (asked, silent):
        one.ready_since_s, one.queued_s = clock() - 2, 3.0
    drafter = FakeDrafter(1.0, before=lambda _: clock.advance(4))
    verifier = FakeVerifier(lambda _: clock.advance(10), timing=CallTiming(queued_s=2, executed_s=5))
    await run_round(asking([asked, silent], [3, 0]), {MODEL: drafter}, verifier, LIMITS, clock=clock)
    await run_round(asking([asked, silent], [0, 0]), {MODEL: drafter}, verifier, LIMITS, clock=clock)
    pieces = asked.request.stream.pieces()
    verify = HopTime(wire_s=3, queued_s=2, executed_s=5)
    drafted = RoundSummary(2, 3, 3, DraftSource.DRAFT, HopTime(wire_s=4), verify, round_s=14, waited_s=5)
    assert (await anext(pieces)).round == drafted
    plain = await anext(pieces)
    assert plain.round == replace(
        drafted, drafted_count=0, accepted_count=0, source=None, propose=None, round_s=10, waited_s=19
    )
    assert (await anext(silent.request.stream.pieces())).round is None


async def test_rounds_that_nobody_read_stay_apart_where_they_are_told() -> None:
    stream, summary = Stream(2), RoundSummary(1, 0, 0, None, None, HopTime(), 1.0, 0.0)
    sent = [
        OutputPiece((OutputToken(n, "", False),), completion_index=index, round=replace(summary, round_s=float(n)))
        for n, index in ((1, 0), (2, 1), (3, 0))
    ]
    for one in sent:
        stream.put(one)
    pieces = stream.pieces()
    assert [await anext(pieces) for _ in sent] == [sent[0], sent[1], sent[2]]


async def test_an_output_with_rounds_told_makes_room_when_enough_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.stream.UNREAD_TOKENS", 3)
    stream, summary, told = Stream(), RoundSummary(1, 0, 0, None, None, HopTime(), 1.0, 0.0), list[bool]()
    stream.tell_room(lambda: told.append(stream.is_full(0)))
    for _ in range(3):
        stream.put(OutputPiece((OutputToken(1, "", False),) * 2, round=summary))
    pieces = stream.pieces()
    await anext(pieces)
    assert (stream.is_full(0), told) == (True, [])
    await anext(pieces)
    assert (stream.is_full(0), told) == (False, [False])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 6)), max_size=12), st.integers(1, 20))
def test_a_token_of_the_prompt_counts_as_cached_once_at_most_and_only_where_it_was_new(
    rows: list[tuple[bool, int, int]], prompt_count: int
) -> None:
    """Whatever is lost, moved or taken in again."""
    generation = generation_of()
    generation.usage = Usage(prompt_count)
    seen, cached, length = 0, set[int](), 0
    for is_lost, count, reused in rows:
        base = 0 if is_lost else length
        reused, length = min(reused, count), base + count
        cached |= {place for place in range(base, base + reused) if seen <= place < prompt_count}
        seen = max(seen, length)
        generation.take_in(base, reused, length)
        assert (generation.usage.cached_prompt_count, generation.target_cached_length) == (len(cached), length)


@pytest.mark.parametrize(
    "result", [Prefilled(3, reused_count=4), Prefilled(3, reused_count=-1), Verdict(0, 7, 5, reused_count=6)]
)
def test_more_reused_tokens_than_the_row_brought_are_a_lie(result: VerifyOutcome) -> None:
    row = VerifyRow("a", 0, (5, 6, 7, 8, 9), ())
    check_verdicts([row], Verdicts([replace(result, reused_count=3)]), VOCABULARY_SIZE)
    with pytest.raises(PeerFailed, match="tokens reused"):
        check_verdicts([row], Verdicts([result]), VOCABULARY_SIZE)


GOOD = TokenLogprobs(-1.0, ((3, -0.5),))


@pytest.mark.parametrize(
    "logprobs",
    [
        (GOOD,) * 3,
        (GOOD,),
        (TokenLogprobs(float("nan"), GOOD.top),) * 2,
        (TokenLogprobs(-1.0, ((VOCABULARY_SIZE, -0.5),)),) * 2,
    ],
    ids=["more", "fewer", "not a number", "beyond the vocabulary"],
)
def test_log_probabilities_of_chosen_tokens_that_cannot_be_true_are_not_taken(
    logprobs: tuple[TokenLogprobs, ...],
) -> None:
    """More of them than tokens came to the client as tokens without an id."""
    row = VerifyRow("a", 4, (1, 2), (7,), None, 1)
    check_verdicts([row], Verdicts([Verdict(1, 7, 7, (GOOD, GOOD))]), VOCABULARY_SIZE)
    with pytest.raises(PeerFailed, match="cannot be true"):
        check_verdicts([row], Verdicts([Verdict(1, 7, 7, logprobs)]), VOCABULARY_SIZE)


@pytest.mark.parametrize("field", ["queued_s", "executed_s", "others_s", "worked_s"])
@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_of_a_call_that_cannot_be_true_are_not_taken(field: str, time_s: float) -> None:
    """One that is not a number stayed in the sums, metrics and prices for the coordinator's life."""
    asked, proposal = ProposeRow("a", 0, (5, 6), 1), Proposal((7,), 2)
    row, verdict = VerifyRow("a", 0, (5, 6), ()), Verdict(0, 7, 2)
    true, false = CallTiming(-1e-9, 2.0, 0.5, 1e8), replace(CallTiming(), **{field: time_s})
    check_proposals([asked], Proposals([proposal], true))
    check_verdicts([row], Verdicts([verdict], true), VOCABULARY_SIZE)
    with pytest.raises(PeerFailed, match="times cannot be true"):
        check_proposals([asked], Proposals([proposal], false))
    with pytest.raises(PeerFailed, match="times cannot be true"):
        check_verdicts([row], Verdicts([verdict], false), VOCABULARY_SIZE)
