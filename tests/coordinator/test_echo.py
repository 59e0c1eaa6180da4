"""A prompt that is sent back: once, before all output, with the target's own log-probabilities, whatever fails."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from coordinator.door.admission import MAX_ECHOED_TOKENS
from coordinator.door.served import Served
from coordinator.replicas.plausibility import check_verdicts
from coordinator.requests.generation import Request
from coordinator.requests.prompt_scores import PromptScores
from paceline.client import Client
from paceline.detokenizer import TokenDecoder
from paceline.errors import InvalidRequest, PeerFailed, PeerUnavailable
from paceline.text import TextCodec
from paceline.types import (
    GenerationRequest,
    OutputPiece,
    OutputToken,
    Prefilled,
    ReceivedOutput,
    TokenIds,
    TokenizerFiles,
    TokenLogprobs,
    UserMessage,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)
from tests.coordinators import SERVED, admission, dispatching, fake_server, prompts, scheduling, submit
from tests.fakes import dispatches
from tests.fakes.dispatches import whole
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, logprobs_of
from tests.fakes.proxy import running_proxy
from tests.fakes.tokenizers import DECODERS, byte_tokenizer, word_tokenizer

LONG = tuple(4 + n * n % 40 for n in range(5 * CHUNK_TOKENS + 3))


def asked(prompt: tuple[int, ...], count: int = 12, outputs: int = 1, top_count: int | None = 2) -> GenerationRequest:
    return GenerationRequest(
        TokenIds(prompt),
        count,
        ignore_end_tokens=True,
        completion_count=outputs,
        top_logprob_count=top_count,
        echo_prompt=True,
    )


def echoed(prompt: Sequence[int], top_count: int | None = 2) -> tuple[OutputToken, ...]:
    def scores(place: int) -> TokenLogprobs | None:
        return None if top_count is None or place == 0 else logprobs_of(prompt[: place + 1], top_count)

    return tuple(OutputToken(token_id, "", False, scores(place)) for place, token_id in enumerate(prompt))


async def pieces_of(request: Request) -> list[OutputPiece]:
    return [piece async for piece in request.stream.pieces()]


def assert_whole(pieces: Sequence[OutputPiece], prompt: tuple[int, ...], count: int = 12, outputs: int = 1) -> None:
    """Check that the prompt came first and once, and that the outputs are the target's own."""
    first, *later = pieces
    assert (first.prompt_tokens, first.tokens, first.finish) == (echoed(prompt), (), None)
    assert not any(piece.prompt_tokens for piece in later)
    for index in range(outputs):
        tokens = [token for piece in later if piece.completion_index == index for token in piece.tokens]
        assert [token.token_id for token in tokens] == whole(prompt, count)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("outputs", [1, 3])
async def test_the_prompt_comes_first_and_once_with_its_scores(lanes: int, outputs: int) -> None:
    verifier = FakeVerifier()
    asking = [LONG, *prompts(7)]
    async with scheduling(FakeDrafter(0.8), verifier, lanes=lanes) as (door, scheduler):
        requests = [submit(scheduler, door.admit(asked(one, outputs=outputs))) for one in asking]
        for prompt, pieces in zip(asking, await asyncio.gather(*map(pieces_of, requests)), strict=True):
            assert_whole(pieces, prompt, outputs=outputs)
    scored = {row.sequence_id for call in verifier.calls for row in call if row.scores_tokens}
    assert len(scored) == sum(len(prompt) > 1 for prompt in asking), "one output of each asks for scores"


async def test_without_log_probabilities_the_prompt_is_there_at_once_and_no_target_is_asked() -> None:
    request = admission(SERVED).admit(asked(LONG, top_count=None))
    assert await anext(request.stream.pieces()) == OutputPiece((), prompt_tokens=echoed(LONG, None))
    verifier = FakeVerifier()
    async with scheduling(FakeDrafter(0.8), verifier) as (door, scheduler):
        await pieces_of(submit(scheduler, door.admit(asked(LONG, top_count=None))))
    assert not any(row.scores_tokens for call in verifier.calls for row in call)


@pytest.mark.parametrize("text", ["é", "aé"])
def test_each_token_of_a_scored_prompt_comes_with_its_bytes_and_those_of_the_likeliest(text: str) -> None:
    tokenizer = byte_tokenizer()
    token_ids, other = tokenizer.encode(text).ids, tokenizer.encode("b").ids[0]
    scores = PromptScores(token_ids, TokenDecoder(tokenizer), are_wanted=True)
    for base_length in (0, *range(len(token_ids) - 1)):  # the first part comes twice, as after a loss
        scores.take(base_length, [TokenLogprobs(-1.0, ((other, -0.5),))])
    first, *later = scores.tokens()
    assert b"".join(one.token_bytes for one in (first, *later)) == text.encode()
    assert (first.logprobs, first.top_token_bytes) == (None, ())
    assert {one.top_token_bytes for one in later} == {(b"b",)}


@pytest.mark.parametrize(("kind", "expected"), [(TokenIds, " a b"), (UserMessage, "a b")])
def test_an_output_goes_on_with_the_text_of_a_prompt_and_answers_a_conversation_with_a_new_one(
    kind: type[TokenIds | UserMessage], expected: str
) -> None:
    """Decoders of SentencePiece's kind drop the space that a text begins with."""
    tokenizer = word_tokenizer(DECODERS["llama"])
    codec = TextCodec(TokenizerFiles(tokenizer.to_str(), "{{ messages[0].content }}"))
    door = admission(Served(replace(SERVED.target, vocabulary_size=300), codec))
    prompt = TokenIds((1,)) if kind is TokenIds else UserMessage("a")
    (generation,) = door.admit(GenerationRequest(prompt, 5)).generations
    assert "".join(one.text for one in generation.output.extend([1, 0, 2], 0)) == expected


def test_a_prompt_that_is_not_scored_comes_without_bytes() -> None:
    tokenizer = byte_tokenizer()
    scores = PromptScores(tokenizer.encode("ab").ids, TokenDecoder(tokenizer), are_wanted=False)
    assert scores.is_whole
    assert [(one.text, one.token_bytes) for one in scores.tokens()] == [("a", b""), ("b", b"")]


async def test_lost_caches_and_short_ones_change_no_score() -> None:
    """The cache is lost three times while prompts are scored, and holds less than the generations together."""
    verifier = FakeVerifier(
        before=lambda number: verifier.evict() if number in (3, 8, 12) else None, capacity_tokens=len(LONG) + 40
    )
    async with scheduling(FakeDrafter(0.8), verifier, lanes=2) as (door, scheduler):
        asking = [LONG, LONG[3:], *prompts(5)]
        requests = [submit(scheduler, door.admit(asked(one))) for one in asking]
        for prompt, pieces in zip(asking, await asyncio.gather(*map(pieces_of, requests)), strict=True):
            assert_whole(pieces, prompt)
    assert scheduler.statistics.snapshot().preemption_count


@pytest.mark.parametrize("after", range(1, 7))
async def test_a_target_lost_while_it_scores_is_followed_by_another(after: int) -> None:
    def vanish(number: int) -> None:
        if number == after:
            dying.away = PeerUnavailable("killed")

    dying, other = FakeVerifier(vanish), FakeVerifier()
    async with dispatching([FakeDrafter(0.8)], [dying, other]) as running:
        running.targets[1].lose(PeerUnavailable("not yet"))
        request = dispatches.submit(running, LONG, 12, top_logprob_count=2, echo_prompt=True)
        await dispatches.until(lambda: dying.away is not None)
        await running.targets[1].look()
        assert_whole(await pieces_of(request), LONG)


class Changing(FakeVerifier):
    """Answers rows that are scored otherwise than it should."""

    def __init__(self, change: Callable[[VerifyOutcome], VerifyOutcome]) -> None:
        super().__init__()
        self._change = change

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        verdicts = await super().verify(rows, timeout_s)
        results = [
            self._change(one) if isinstance(one, Verdict | Prefilled) and one.token_logprobs else one
            for one in verdicts.results
        ]
        return replace(verdicts, results=results)


def without_scores(result: VerifyOutcome) -> VerifyOutcome:
    return replace(result, token_logprobs=())


async def test_a_service_that_knows_no_scores_fails_the_request_and_nothing_else() -> None:
    old = Changing(without_scores)
    async with dispatching([FakeDrafter(0.8)], [old]) as running:
        others = [dispatches.submit(running, (n, n)) for n in (5, 6)]
        for prompt in (LONG, (7, 8)):
            request = dispatches.submit(running, prompt, top_logprob_count=0, echo_prompt=True)
            with pytest.raises(
                PeerFailed, match="no log-probabilities of a prompt.*older.*upgrade it, or leave out echo"
            ):
                await pieces_of(request)
        assert [await dispatches.output(one) for one in others] == [whole((n, n)) for n in (5, 6)]
        assert running.targets[0].is_up
    assert not old.token_ids


async def test_a_request_that_an_old_service_cannot_serve_goes_to_a_newer_one() -> None:
    old, new = Changing(without_scores), FakeVerifier()
    async with dispatching([], [old, new]) as running:
        requests = [dispatches.submit(running, LONG, 12, top_logprob_count=2, echo_prompt=True) for _ in range(2)]
        for pieces in await asyncio.gather(*map(pieces_of, requests)):
            assert_whole(pieces, LONG)
    assert old.calls


ROW = VerifyRow("a", 4, (1, 2, 3, 4), (), None, 1, scores_tokens=True)
PART = replace(ROW, following_count=9)
GOOD = TokenLogprobs(-1.0, ((3, -0.5),))


@pytest.mark.parametrize(
    ("row", "result"),
    [
        (ROW, Verdict(0, 1, 8, (), (GOOD,) * 2)),
        (ROW, Verdict(0, 1, 8, (), (GOOD,) * 4)),
        (ROW, Prefilled(6, (GOOD,))),
        (PART, Prefilled(8, (GOOD,) * 4)),
        (replace(ROW, scores_tokens=False), Verdict(0, 1, 8, (), (GOOD,) * 3)),
        (ROW, Prefilled(5, (TokenLogprobs(0.5, ((3, -0.5),)),))),
        (ROW, Prefilled(5, (TokenLogprobs(math.nan, ((3, -0.5),)),))),
        (ROW, Prefilled(5, (TokenLogprobs(-1.0, ((VOCABULARY_SIZE, -0.5),)),))),
        (ROW, Prefilled(5, (TokenLogprobs(-1.0, ((3, math.nan),)),))),
        (ROW, Prefilled(5, (TokenLogprobs(-1.0),))),
    ],
)
def test_scores_that_cannot_be_true_are_refused(row: VerifyRow, result: VerifyOutcome) -> None:
    with pytest.raises(PeerFailed, match="cannot be true: log-probabilities"):
        check_verdicts([row], Verdicts([result]), VOCABULARY_SIZE)


@pytest.mark.parametrize(
    ("row", "result"),
    [
        (ROW, Verdict(0, 1, 8, (), (GOOD,) * 3)),
        (ROW, Prefilled(6, (GOOD,) * 2)),
        (PART, Prefilled(7, (GOOD,) * 3)),
        (PART, Prefilled(4)),
        (ROW, Prefilled(5, (TokenLogprobs(-math.inf, ((3, 1e-6),)),))),
    ],
)
def test_scores_that_can_be_true_are_taken(row: VerifyRow, result: VerifyOutcome) -> None:
    check_verdicts([row], Verdicts([result]), VOCABULARY_SIZE)


def test_what_cannot_be_sent_back_is_refused_by_name() -> None:
    target = replace(SERVED.target, max_length=1 << 20, cache=replace(SERVED.target.cache, max_length=1 << 20))
    door = admission(replace(SERVED, target=target))
    assert door.admit(asked((5,) * MAX_ECHOED_TOKENS))
    with pytest.raises(InvalidRequest, match="a prompt of 16385 tokens; 16384 at most") as refusal:
        door.admit(asked((5,) * (MAX_ECHOED_TOKENS + 1)))
    assert refusal.value.field == "echo_prompt"
    with pytest.raises(InvalidRequest, match="leave echo_prompt out") as refusal:
        door.admit(replace(asked((5, 6)), received_outputs=(ReceivedOutput(0, (7,)),), seed=1))
    assert refusal.value.field == "echo_prompt"


async def test_a_client_whose_stream_breaks_gets_the_prompt_once() -> None:
    server = fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), batch_size=4)
    async with server as running, running_proxy(running.address) as proxy, Client(proxy.address) as client:
        pieces: list[OutputPiece] = []
        async for piece in client.generate(asked(LONG, 200, 2)):
            pieces.append(piece)
            if proxy.cut_count < 3 and not piece.finish:
                proxy.cut()
        assert proxy.cut_count == 3
        assert_whole(pieces, LONG, 200, 2)
