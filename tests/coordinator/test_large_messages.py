"""Messages that gRPC would not carry: they end the call at fault, and no other call of its stream."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.door.outbox import Outbox, Sending
from coordinator.door.streamed_calls import StreamedCalls
from coordinator.requests.stream import Stream
from paceline.client import NO_RETRIES, Client, Retry, RetryPolicy
from paceline.codec.generation import piece_from_pb
from paceline.errors import MessageTooLarge, PacelineError, SharedStreamLost
from paceline.types import (
    FinishReason,
    GenerationFinish,
    GenerationRequest,
    OutputPiece,
    OutputToken,
    TokenIds,
    TokenLogprobs,
    Usage,
    Verdict,
    VerifyOutcome,
    VerifyRow,
)
from paceline.v1 import generation_service_pb2 as pb
from paceline.wire import RunningServer, open_channel
from tests.coordinators import fake_server
from tests.fakes.dispatches import whole
from tests.fakes.model_services import FakeDrafter, FakeVerifier, logprobs_of
from tests.scrapes import value

MOST_BYTES = 500
PROMPT = (5, 6)
ECHO = GenerationRequest(TokenIds((7,) * 100), 1, echo_prompt=True, top_logprob_count=20)
"""Its prompt with log-probabilities is one message, of some 19 kB."""
QUICKLY = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)
FINISH = GenerationFinish(FinishReason.LENGTH, Usage(prompt_count=2), 1)


class ScoringVerifier(FakeVerifier):
    """Tells the likeliest tokens of outputs too, where they are asked for."""

    def _verify(self, row: VerifyRow) -> VerifyOutcome | PacelineError:
        outcome = super()._verify(row)
        if row.top_logprob_count is None or not isinstance(outcome, Verdict):
            return outcome
        scores = tuple(logprobs_of((place,), row.top_logprob_count) for place in range(outcome.accepted_count + 1))
        return replace(outcome, logprobs=scores)


@asynccontextmanager
async def server(registry: CollectorRegistry | None = None, **settings: Any) -> AsyncIterator[RunningServer]:
    several: dict[str, Any] = {"batch_size": 8, "max_message_bytes": MOST_BYTES}
    registry = registry or CollectorRegistry()
    async with fake_server(FakeDrafter(1.0), ScoringVerifier(), registry, **several | settings) as running:
        yield running


class Others:
    """Calls of the same stream that are under way, and wait because they are not read."""

    def __init__(self, client: Client) -> None:
        # So long that they are held: they can't end before they are read.
        request = GenerationRequest(TokenIds(PROMPT), 900, max_draft_count=0, ignore_end_tokens=True)
        self._calls = [client.generate(request) for _ in range(2)]
        self._ids: list[list[int]] = [[] for _ in self._calls]

    async def begin(self) -> None:
        for ids, call in zip(self._ids, self._calls, strict=True):
            ids += [token.token_id for token in (await anext(call)).tokens]

    async def are_whole(self) -> bool:
        for ids, call in zip(self._ids, self._calls, strict=True):
            ids += [token.token_id async for piece in call for token in piece.tokens]
        return self._ids == [whole(PROMPT, 900)] * len(self._calls)


@pytest.mark.parametrize(
    "large",
    [ECHO, replace(ECHO, echo_prompt=False, max_new_tokens=20, tell_rounds=True, ignore_end_tokens=True)],
    ids=["prompt", "round"],
)
async def test_what_no_message_can_carry_ends_its_own_call_alone(large: GenerationRequest) -> None:
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        others = Others(client)
        await others.begin()
        with pytest.raises(MessageTooLarge, match=r"at most 500; .*top_logprob_count.*--max-message-bytes"):
            await client.complete(large)
        assert await others.are_whole()


async def test_a_request_that_a_coordinator_does_not_take_ends_its_own_call_alone() -> None:
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        others = Others(client)
        await others.begin()
        with pytest.raises(MessageTooLarge, match=r"at most 500; shorten the prompt"):
            await client.complete(GenerationRequest(TokenIds((5,) * 2000), 1))
        assert await others.are_whole()


@pytest.mark.parametrize("message", [bytes(MOST_BYTES + 1), None], ids=["too large", "none"])
async def test_a_request_that_does_not_come_is_no_error_of_the_coordinator(
    message: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC has ended the call of one that is too large, so it takes no status any more."""
    with capture_logs() as logs:
        async with server() as running, open_channel(running.address) as channel:
            call: Any = channel.stream_stream("/paceline.v1.GenerationService/GenerateText")(timeout=0.5)
            if message is not None:
                await call.write(message)
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() is not grpc.StatusCode.UNKNOWN
            async with Client(running.address, NO_RETRIES) as client:  # as its calls, the one before has ended
                await client.complete(GenerationRequest(TokenIds(PROMPT), 1))
    assert not [one for one in logs if one["log_level"] == "error"]
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_tokens_that_are_too_many_for_a_message_go_in_several() -> None:
    request = GenerationRequest(TokenIds(PROMPT), 20, ignore_end_tokens=True, top_logprob_count=20)
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        assert (await client.complete(request)).token_ids == whole(PROMPT, 20)


def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have streams send and take whatever comes, as those of older coordinators do."""

    def made(begin: Any, around: Any, most: int, most_bytes: int) -> StreamedCalls:
        return StreamedCalls(begin, around, most, 1 << 30)

    monkeypatch.setattr("coordinator.door.open_streams.StreamedCalls", made)
    monkeypatch.setattr("coordinator.door.servicer.MOST_BYTES_KEY", "unknown")


@pytest.mark.parametrize(
    "large", [ECHO, GenerationRequest(TokenIds((5,) * 20_000), 1)], ids=["large answer", "large request"]
)
async def test_calls_whose_stream_another_ended_go_on_and_the_one_at_fault_learns_of_it(
    large: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_limits(monkeypatch)
    retries: list[Retry] = []
    async with (
        server(max_message_bytes=15_000) as running,  # enough for all of the others' tokens, which come at once
        Client(running.address, QUICKLY, shares_stream=True, on_retry=retries.append) as client,
    ):
        others = Others(client)
        await others.begin()
        with pytest.raises(MessageTooLarge, match="larger than max"):
            await client.complete(large)
        assert await others.are_whole()
    assert [type(one.error) for one in retries] == [SharedStreamLost] * 3, "each of them lost its stream once"


async def test_a_call_alone_on_a_stream_that_it_ends_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    without_limits(monkeypatch)
    registry = CollectorRegistry()
    async with server(registry) as running, Client(running.address, QUICKLY, shares_stream=True) as client:
        with pytest.raises(MessageTooLarge, match="larger than max"):
            await client.complete(ECHO)
        assert (await client.complete(GenerationRequest(TokenIds(PROMPT), 5))).tokens, "over another stream"
    assert value(registry, "requests_total", code="OK") + value(registry, "requests_total", code="CANCELLED") == 2


def piece(place: int, text: str = "", **values: Any) -> OutputPiece:
    logprobs = TokenLogprobs(-1.0, ((place, -1.0),) * 3)
    return OutputPiece((OutputToken(place, text, accepted=False, logprobs=logprobs),), **values)


def send(outbox: Outbox, call_id: int, *pieces: OutputPiece) -> Sending:
    stream = Stream()
    for one in pieces:
        stream.put(one)
    return outbox.send(call_id, SimpleNamespace(stream=stream, deliver=lambda piece: None))  # type: ignore[arg-type]


async def sent(outbox: Outbox, most_bytes: int) -> list[pb.CallUpdate]:
    """Return what messages carry, none of which is too large."""
    outbox.finish()
    messages = [one async for one in outbox.messages()]
    assert all(0 < len(one) <= most_bytes for one in messages)
    return [update for one in messages for update in pb.GenerateStreamResponse.FromString(one).updates]


def ids(updates: list[pb.CallUpdate], call_id: int) -> list[int]:
    pieces = [piece_from_pb(one.response) for one in updates if one.call_id == call_id]
    return [token.token_id for one in pieces for token in one.tokens]


async def test_updates_that_fit_alone_and_not_together_go_in_several_messages_in_order() -> None:
    outbox = Outbox(1000)
    for call_id in range(7):
        outbox.add(pb.CallUpdate(call_id=call_id, response=pb.GenerateTextResponse(runs=[run(300)])))
    assert [one.call_id for one in await sent(outbox, 1000)] == list(range(7))


def run(byte_count: int) -> pb.TokenRun:
    return pb.TokenRun(token_ids=[5], texts=["a" * byte_count])


async def test_closing_is_told_once_where_a_message_becomes_several() -> None:
    outbox = Outbox(1000)
    outbox.tell_closing()
    for call_id in range(7):
        outbox.add(pb.CallUpdate(call_id=call_id, response=pb.GenerateTextResponse(runs=[run(300)])))
    outbox.finish()
    messages = [pb.GenerateStreamResponse.FromString(one) async for one in outbox.messages()]
    assert [one.closing for one in messages] == [True, *[False] * (len(messages) - 1)]


@pytest.mark.parametrize("made", [lambda place: piece(place), lambda place: plain(place)], ids=["scored", "plain"])
async def test_an_output_that_nobody_read_for_long_goes_in_several_messages_and_ends_with_the_last(
    made: Callable[[int], OutputPiece],
) -> None:
    outbox = Outbox(500)
    sending = send(outbox, 1, *map(made, range(5, 105)), OutputPiece((), FINISH))
    updates = await sent(outbox, 500)
    assert ids(updates, 1) == list(range(5, 105))
    finished = [(one.response.HasField("finish"), one.HasField("ended")) for one in updates]
    assert finished == [*[(False, False)] * (len(updates) - 1), (True, True)]
    await sending.wait()


def plain(place: int) -> OutputPiece:
    return OutputPiece((OutputToken(place, "some text", accepted=False),))


async def test_a_call_with_a_token_too_large_fails_though_its_output_had_ended_and_sends_nothing_of_it() -> None:
    outbox = Outbox(500)
    large = send(outbox, 1, piece(5), piece(6, "a" * 600), piece(7), OutputPiece((), FINISH))
    other = send(outbox, 2, piece(8), OutputPiece((), FINISH))
    updates = await sent(outbox, 500)
    assert {one.call_id for one in updates} == {2}, "a part would be an output with a gap"
    assert ids(updates, 2) == [8]
    await other.wait()
    with pytest.raises(MessageTooLarge, match="at most 500"):
        await large.wait()
    assert not large.has_told_end


async def test_an_end_that_is_too_large_is_sent_alone_all_the_same() -> None:
    """Its call has ended and nothing else can tell that: better a lost stream than one that waits for ever."""
    outbox = Outbox(100)
    sending = send(outbox, 1, piece(5))
    outbox.end(sending)
    ended = pb.CallUpdate(call_id=1)
    ended.ended.message = "a" * 200
    for update in (pb.CallUpdate(call_id=2), ended, pb.CallUpdate(call_id=3)):
        outbox.add(update)
    outbox.finish()
    messages = [pb.GenerateStreamResponse.FromString(one) async for one in outbox.messages()]
    assert [[update.call_id for update in one.updates] for one in messages] == [[2], [1], [3]]
