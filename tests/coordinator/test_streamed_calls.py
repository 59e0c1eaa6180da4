"""Calls over one `GenerateStream`: each is what a `GenerateText` would be, and none harms another."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.door import streamed_calls
from coordinator.door.field_count import MAX_FIELDS
from coordinator.door.outbox import MESSAGE_TOKENS, MOST_UPDATES, Outbox
from coordinator.door.servicer import GenerationServicer, add_generation_service
from coordinator.door.streamed_calls import MOST_CONTEXT_BYTES
from coordinator.requests.stream import Stream
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.codec.generation import piece_from_pb, request_from_pb, request_to_pb
from paceline.codec.names import GENERATE_STREAM
from paceline.errors import CallTimedOut, InvalidRequest, PacelineError, PeerUnavailable
from paceline.types import GenerationRequest, OutputPiece, OutputToken, TokenIds
from paceline.v1 import common_pb2
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import RunningServer, open_channel
from tests.coordinators import fake_server
from tests.fakes.dispatches import until, whole
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation
from tests.fakes.proxy import running_proxy
from tests.ports import port_for_later
from tests.scrapes import by_label, value
from tests.spans import Spans

PROMPTS = [(n, n + 1) for n in range(5, 13)]


@asynccontextmanager
async def server(verifier: FakeVerifier | None = None, **settings: Any) -> AsyncIterator[RunningServer]:
    several: dict[str, Any] = {"batch_size": 8, "max_new_tokens": 30}
    async with fake_server(
        FakeDrafter(0.7), verifier or FakeVerifier(), CollectorRegistry(), **several | settings
    ) as running:
        yield running


class RawStream:
    """A stream as its messages are."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def ask(self, call_id: int, **action: Any) -> None:
        await self._call.write(pb.GenerateStreamRequest(call_id=call_id, **action))

    async def start(self, call_id: int, request: GenerationRequest) -> None:
        await self.ask(call_id, start=pb.StartedCall(request=request_to_pb(request)))

    async def read(self) -> pb.GenerateStreamResponse:
        message = await self._call.read()
        assert message is not grpc.aio.EOF
        return message  # type: ignore[no-any-return]

    async def read_until_ended(self, call_ids: Iterable[int]) -> list[pb.GenerateStreamResponse]:
        left, messages = set(call_ids), []
        while left:
            messages.append(await self.read())
            left -= {one.call_id for one in messages[-1].updates if one.HasField("ended")}
        return messages


@asynccontextmanager
async def raw_stream(running: RunningServer) -> AsyncIterator[RawStream]:
    async with open_channel(running.address) as channel:
        call: Any = GenerationServiceStub(channel).GenerateStream()
        yield RawStream(call)
        call.cancel()


def ids(messages: Iterable[pb.GenerateStreamResponse], call_id: int) -> list[int]:
    pieces = [piece_from_pb(one.response) for message in messages for one in message.updates if one.call_id == call_id]
    return [token.token_id for piece in pieces for token in piece.tokens]


async def outputs(client: Client, requests: Iterable[GenerationRequest]) -> list[list[int]]:
    return [one.token_ids for one in await asyncio.gather(*map(client.complete, requests))]


async def test_calls_over_one_stream_get_the_same_tokens_as_calls_of_their_own() -> None:
    requests = [GenerationRequest(TokenIds(one)) for one in PROMPTS]
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        assert await outputs(client, requests) == [continuation(one, 30) for one in PROMPTS]


async def test_a_round_is_one_message_for_all_calls() -> None:
    verifier = FakeVerifier()
    async with server(verifier) as running, raw_stream(running) as stream:
        for call_id, prompt in enumerate(PROMPTS):
            await stream.start(call_id, GenerationRequest(TokenIds(prompt), ignore_end_tokens=True))
        messages = await stream.read_until_ended(range(len(PROMPTS)))
        for call_id in range(len(PROMPTS)):
            assert len(ids(messages, call_id)) == 30
        # How many calls share a round depends on when they come; each of them is accepted before it has any.
        assert any(len(rows) > 1 for rows in verifier.calls)
        assert len(messages) <= len(verifier.calls) + len(PROMPTS)


async def test_a_call_that_is_refused_ends_alone_with_its_status() -> None:
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        good = asyncio.create_task(client.complete(GenerationRequest(TokenIds(PROMPTS[0]))))
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(GenerationRequest(TokenIds(())))
        assert caught.value.field == "prompt"
        assert (await good).token_ids == continuation(PROMPTS[0], 30)


async def test_a_cancelled_call_ends_with_cancelled_and_frees_its_place() -> None:
    verifier = FakeVerifier()
    async with server(verifier, max_new_tokens=10_000) as running, raw_stream(running) as stream:
        await stream.start(1, GenerationRequest(TokenIds((5,)), ignore_end_tokens=True))
        await stream.read()
        await stream.ask(1, cancel=pb.CancelledCall())
        (ended,) = [one for one in (await stream.read_until_ended([1]))[-1].updates if one.HasField("ended")]
        assert ended.ended.code == grpc.StatusCode.CANCELLED.value[0]
        await until(lambda: not verifier.token_ids)
        await stream.start(1, GenerationRequest(TokenIds(PROMPTS[1]), max_new_tokens=20))
        assert ids(await stream.read_until_ended([1]), 1) == continuation(PROMPTS[1], 20), "its name is free again"


async def test_a_broken_stream_cancels_its_calls() -> None:
    registry, verifier = CollectorRegistry(), HeldVerifier(1)
    async with fake_server(FakeDrafter(0.7), verifier, registry, batch_size=8) as running:
        async with raw_stream(running) as stream:
            for call_id in (1, 2):
                await stream.start(call_id, GenerationRequest(TokenIds((5, call_id)), ignore_end_tokens=True))
            accepted = set[int]()
            while accepted != {1, 2}:
                accepted |= {one.call_id for one in (await stream.read()).updates}
            await until(lambda: bool(verifier.token_ids))
        await until(lambda: value(registry, "requests_total", code="CANCELLED") == 2)
        verifier.open.set()
        await until(lambda: not verifier.token_ids)
        assert len(verifier.calls) == 2, "only the round that they were in ends"


async def test_a_held_call_gets_nothing_more_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.requests.stream.UNREAD_TOKENS", 20)
    request = GenerationRequest(TokenIds(PROMPTS[0]), 200, ignore_end_tokens=True)
    async with server(draft_count=0) as running, raw_stream(running) as stream:
        await stream.ask(7, hold=True)  # nothing: there is no such call
        await stream.start(1, request)
        await stream.ask(1, hold=True)
        await stream.start(2, request)
        messages = await stream.read_until_ended([2])
        assert len(ids(messages, 2)) == 200
        assert len(ids(messages, 1)) < 200
        await stream.ask(1, hold=False)
        messages += await stream.read_until_ended([1])
        assert ids(messages, 1) == ids(messages, 2)


@pytest.mark.parametrize("is_queued", [False, True])
async def test_calls_that_are_held_go_on_once_nobody_could_say_so(is_queued: bool) -> None:
    """A caller that had nothing more to ask and left one held had no end of it, and a server that stopped waited."""
    request = GenerationRequest(TokenIds(PROMPTS[0]), ignore_end_tokens=True)
    async with server() as running, open_channel(running.address) as channel:
        call: Any = GenerationServiceStub(channel).GenerateStream()
        stream = RawStream(call)
        await stream.start(1, request)
        if is_queued:
            await stream.read()
        await stream.ask(1, hold=True)
        await call.done_writing()
        assert ids(await stream.read_until_ended([1]), 1)
        assert await call.code() is grpc.StatusCode.OK


async def test_a_call_whose_deadline_passes_ends_alone() -> None:
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        good = asyncio.create_task(client.complete(GenerationRequest(TokenIds(PROMPTS[0]))))
        with pytest.raises(CallTimedOut):
            await client.complete(GenerationRequest(TokenIds((5,))), timeout_s=0.0)
        assert (await good).token_ids == continuation(PROMPTS[0], 30)


async def test_a_call_whose_time_was_up_before_it_was_queued_is_no_refused_one() -> None:
    """It counted as refused, for a reason that the reference has not; one with a stream of its own did not."""
    registry = CollectorRegistry()
    async with fake_server(FakeDrafter(0.7), FakeVerifier(), registry) as running, raw_stream(running) as stream:
        started = pb.StartedCall(request=request_to_pb(GenerationRequest(TokenIds((5,)))))
        started.context.timeout_s = 0.0
        await stream.ask(1, start=started)
        await stream.read_until_ended([1])
    assert by_label(registry, "requests_total", "code") == {"DEADLINE_EXCEEDED": 1}
    assert by_label(registry, "requests_rejected_total", "reason") == {}


@pytest.mark.parametrize(("timeout_s", "code"), [(60.0, "DEADLINE_EXCEEDED"), (None, "CANCELLED")])
async def test_a_call_that_its_caller_cancels_at_its_deadline_counts_as_timed_out(
    timeout_s: float | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's clock may be the first to say that time is up."""
    monkeypatch.setattr("paceline.wire.status.DEADLINE_SLACK_S", 100.0)
    registry, started = CollectorRegistry(), pb.StartedCall(request=request_to_pb(GenerationRequest(TokenIds((5,)))))
    started.context.CopyFrom(common_pb2.RequestContext(timeout_s=timeout_s))
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), registry, batch_size=8, max_new_tokens=10_000) as running,
        raw_stream(running) as stream,
    ):
        await stream.ask(1, start=started)
        await stream.read()
        await stream.ask(1, cancel=pb.CancelledCall())
        await stream.read_until_ended([1])
        assert registry.get_sample_value("paceline_requests_total", {"code": code}) == 1


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
async def test_a_deadline_that_is_none_is_refused(timeout_s: float) -> None:
    async with server() as running, raw_stream(running) as stream:
        started = pb.StartedCall(request=request_to_pb(GenerationRequest(TokenIds((5,)))))
        started.context.timeout_s = timeout_s
        await stream.ask(1, start=started)
        (update,) = (await stream.read()).updates
        assert "context.timeout_s is" in update.ended.message


async def test_a_context_longer_than_metadata_may_be_is_refused() -> None:
    """It is kept as long as its call."""
    async with server() as running, raw_stream(running) as stream:
        started = pb.StartedCall(request=request_to_pb(GenerationRequest(TokenIds((5,)))))
        started.context.span.headers["baggage"] = "x" * MOST_CONTEXT_BYTES
        await stream.ask(1, start=started)
        (update,) = (await stream.read()).updates
        assert "context has 16" in update.ended.message


async def test_a_call_that_was_read_keeps_nothing_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that waited, each of the 8 MiB that a message may have, took a gigabyte."""
    messages: list[bytes] = []
    requests: list[pb.GenerateTextRequest] = []
    monkeypatch.setattr(streamed_calls, "check_field_count", lambda message, _: messages.append(message))

    def read(request: pb.GenerateTextRequest) -> GenerationRequest:
        requests.append(request)
        return request_from_pb(request)

    monkeypatch.setattr(streamed_calls, "request_from_pb", read)
    async with server(HeldVerifier(0)) as running, raw_stream(running) as stream:
        await stream.start(1, GenerationRequest(TokenIds((5,)), ignore_end_tokens=True))
        (update,) = (await stream.read()).updates
        assert update.response.HasField("accepted")
        holder_counts = sys.getrefcount(messages[0]), sys.getrefcount(requests[0])
        assert holder_counts == (2, 2)  # the list, and the argument


async def test_at_most_so_many_calls_are_under_way_on_a_stream() -> None:
    async with server(max_concurrent_streams=2, max_new_tokens=10_000) as running, raw_stream(running) as stream:
        for n in (5, 6):
            await stream.start(n, GenerationRequest(TokenIds((n,)), ignore_end_tokens=True))
        await stream.start(7, GenerationRequest(TokenIds((7,))))
        ended = (await stream.read_until_ended([7]))[-1].updates
        (words,) = [one.ended.message for one in ended if one.call_id == 7]
        assert "2 calls of this stream are under way" in words


async def test_calls_beyond_what_a_coordinator_takes_on_a_stream_go_to_another() -> None:
    async with (
        server(max_concurrent_streams=3, max_new_tokens=10_000) as running,
        Client(running.address, NO_RETRIES, shares_stream=True) as client,
    ):
        requests = [GenerationRequest(TokenIds((n,)), ignore_end_tokens=True) for n in range(5, 10)]
        pieces = [client.generate(one) for one in requests]
        # All at once: none of them knows yet what the coordinator takes.
        await asyncio.gather(*(anext(one) for one in pieces))
        for one in pieces:
            await one.aclose()


async def test_a_coordinator_that_says_it_takes_no_call_on_a_stream_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client opened stream after stream."""
    monkeypatch.setattr("paceline.shared_stream.MOST_CALLS", 0)  # as if it had been told
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        async with asyncio.timeout(10):
            assert (await client.complete(GenerationRequest(TokenIds((5,)), 3))).tokens


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (pb.GenerateStreamRequest(call_id=1), "asks for nothing"),
        (pb.GenerateStreamRequest(call_id=1, start=pb.StartedCall()), "is that of a call that has not ended"),
    ],
)
async def test_a_senseless_message_ends_the_stream_with_words(first: pb.GenerateStreamRequest, words: str) -> None:
    async with server(max_new_tokens=10_000) as running, open_channel(running.address) as channel:
        call: Any = GenerationServiceStub(channel).GenerateStream()
        request = request_to_pb(GenerationRequest(TokenIds((5,)), ignore_end_tokens=True))
        await call.write(pb.GenerateStreamRequest(call_id=1, start=pb.StartedCall(request=request)))
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError, match=words):
            while await call.read() is not grpc.aio.EOF:
                pass


async def test_a_reader_that_leaves_a_call_unread_holds_it_and_no_other() -> None:
    request = GenerationRequest(TokenIds(PROMPTS[0]), 900, ignore_end_tokens=True)
    async with server(draft_count=0) as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        slow = client.generate(request)
        received = [await anext(slow)]
        whole = (await client.complete(request)).token_ids
        received += [one async for one in slow]
        assert [token.token_id for one in received for token in one.tokens] == whole


async def test_an_end_of_the_server_lets_calls_of_streams_end_and_takes_no_more() -> None:
    pieces: list[OutputPiece] = []
    async with server(max_new_tokens=300) as running:
        client = Client(running.address, NO_RETRIES, shares_stream=True)
        output = client.generate(GenerationRequest(TokenIds(PROMPTS[0]), ignore_end_tokens=True))
        pieces.append(await anext(output))
        rest = asyncio.create_task(_rest(output))
    pieces += await rest
    assert len([token for one in pieces for token in one.tokens]) == 300
    with pytest.raises(PacelineError):
        await client.complete(GenerationRequest(TokenIds(PROMPTS[0])))
    await client.__aexit__(None, None, None)


async def _rest(output: AsyncIterator[OutputPiece]) -> list[OutputPiece]:
    return [one async for one in output]


async def test_calls_whose_stream_is_lost_go_on_with_what_they_have() -> None:
    request = GenerationRequest(TokenIds(PROMPTS[0]), 200, ignore_end_tokens=True)
    quickly = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)
    async with server() as running, Client(running.address, quickly, shares_stream=True) as client:
        calls = [client.generate(request) for _ in range(3)]
        pieces = [[await anext(one)] for one in calls]
        (shared,) = client._shared
        assert shared._opened
        await shared._opened.close()
        for read, call in zip(pieces, calls, strict=True):
            read += await _rest(call)
            assert [token.token_id for one in read for token in one.tokens] == whole(PROMPTS[0], 200)


async def test_calls_whose_stream_is_lost_as_another_begins_go_on_too() -> None:
    """gRPC's stub says INTERNAL to all of them then, which was taken for a failure of the coordinator's."""
    request = GenerationRequest(TokenIds(PROMPTS[0]), 30)
    quickly = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)
    verifier, accepted = HeldVerifier(0), asyncio.Event()
    async with (
        server(verifier) as running,
        running_proxy(running.address) as proxy,
        Client(proxy.address, quickly, shares_stream=True) as client,
    ):
        for turns in range(30):
            verifier.open.clear()
            accepted.clear()
            call = client.generate(request, on_accepted=lambda _: accepted.set())
            reading = asyncio.create_task(_rest(call))
            await accepted.wait()
            proxy.cut()
            for _ in range(turns):
                await asyncio.sleep(0)
            beginning = asyncio.create_task(client.complete(request))
            verifier.open.set()
            assert (await beginning).token_ids == continuation(PROMPTS[0], 30)
            assert [token.token_id for one in await reading for token in one.tokens] == continuation(PROMPTS[0], 30)


async def test_a_caller_that_is_cancelled_while_its_call_begins_harms_no_other() -> None:
    request = GenerationRequest(TokenIds(PROMPTS[0]), 200, ignore_end_tokens=True)
    begins = request_to_pb(GenerationRequest(TokenIds((5,) * 100_000)))
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        call = client.generate(request)
        read = [await anext(call)]
        (shared,) = client._shared
        for turns in range(12):
            beginning = asyncio.create_task(anext(shared.call(begins, None, {})))
            for _ in range(turns):
                await asyncio.sleep(0)
            beginning.cancel()
            await asyncio.wait([beginning])
        read += await _rest(call)
        assert [token.token_id for one in read for token in one.tokens] == whole(PROMPTS[0], 200)


async def test_a_deadline_holds_while_a_coordinator_does_not_take_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(self: Any, requests: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        await asyncio.Event().wait()
        yield pb.GenerateStreamResponse()

    monkeypatch.setattr(GenerationServicer, "GenerateStream", silent)
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        with pytest.raises(CallTimedOut):
            await client.complete(GenerationRequest(TokenIds(PROMPTS[0])), timeout_s=0.1)


async def test_a_long_request_has_a_call_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.client.MOST_SHARED_BYTES", 0)
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=True) as client:
        assert await outputs(client, [GenerationRequest(TokenIds(PROMPTS[0]))]) == [continuation(PROMPTS[0], 30)]
        (shared,) = client._shared
        assert shared._opened is None


async def test_no_more_is_read_of_a_stream_whose_answers_nobody_reads() -> None:
    outbox = Outbox(1 << 20)
    for _ in range(MOST_UPDATES):
        await outbox.room()
        outbox.add(pb.CallUpdate(call_id=1))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await anext(outbox.messages())
    await waiting


async def test_a_coordinator_that_is_not_there_is_unavailable() -> None:
    async with Client(f"127.0.0.1:{port_for_later()}", NO_RETRIES, shares_stream=True) as client:
        with pytest.raises(PeerUnavailable):
            await client.complete(GenerationRequest(TokenIds(PROMPTS[0])))


async def test_a_coordinator_that_knows_no_streams_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.serving.add_generation_service", add_without_streams)
    registry = CollectorRegistry()
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), registry) as running,
        Client(running.address, NO_RETRIES, shares_stream=True) as client,
    ):
        requests = [GenerationRequest(TokenIds(one), 20) for one in PROMPTS[:3]]
        assert await outputs(client, requests) == [continuation(one, 20) for one in PROMPTS[:3]]
        assert await outputs(client, requests) == [continuation(one, 20) for one in PROMPTS[:3]]


def add_without_streams(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    class WithoutStreams:
        """Registers all methods but that of streams."""

        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            del handlers[0]._method_handlers[GENERATE_STREAM]
            server.add_generic_rpc_handlers(handlers)

    add_generation_service(servicer, WithoutStreams())  # type: ignore[arg-type]


async def test_a_token_that_is_revoked_begins_no_more_calls_on_an_open_stream(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token")
    metadata = (("authorization", "Bearer a-token"),)
    async with server(token_file=tokens) as running, open_channel(running.address) as channel:
        call: Any = GenerationServiceStub(channel).GenerateStream(metadata=metadata)
        stream = RawStream(call)
        await stream.start(1, GenerationRequest(TokenIds(PROMPTS[0]), ignore_end_tokens=True))
        messages = [await stream.read()]
        tokens.write_text("another-token")
        await stream.start(2, GenerationRequest(TokenIds(PROMPTS[1])))
        messages += await stream.read_until_ended([1, 2])
        assert len(ids(messages, 1)) == 30
        (ended,) = [one.ended for message in messages for one in message.updates if one.call_id == 2]
        assert ended.code == grpc.StatusCode.UNAUTHENTICATED.value[0]
        call.cancel()


async def test_a_stream_that_is_old_takes_no_more_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.serving.CLIENTS_CONNECTION_AGE_S", 0.0)
    async with server() as running, open_channel(running.address) as channel:
        call: Any = GenerationServiceStub(channel).GenerateStream()
        assert (await call.read()).closing
        assert await call.read() is grpc.aio.EOF


async def test_each_call_of_a_stream_has_a_span_below_its_callers() -> None:
    spans = Spans()
    async with (
        server(tracer=spans.tracer) as running,
        Client(running.address, NO_RETRIES, spans.tracer, shares_stream=True) as client,
    ):
        await outputs(client, [GenerationRequest(TokenIds(one), 10) for one in PROMPTS[:2]])
    served, asked = spans("generate", "server"), spans("generate", "client")
    assert len(served) == 2
    assert {one.parent_id for one in served} == {one.span_id for one in asked}
    assert all(one.attributes["gen_ai.usage.output_tokens"] == 10 for one in served)


async def test_callers_without_a_tracer_name_their_traces_call_by_call() -> None:
    spans = Spans()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with (
        server(tracer=spans.tracer) as running,
        Client(running.address, NO_RETRIES, shares_stream=True) as client,
    ):
        async for _ in client.generate(GenerationRequest(TokenIds(PROMPTS[0]), 10), headers=headers):
            pass
        await client.complete(GenerationRequest(TokenIds(PROMPTS[1]), 10))
    first, second = spans("generate", "server")
    assert (first.trace_id, first.parent_id) == (trace_id, "b7ad6b7169203331")
    assert second.trace_id != trace_id
    assert not second.parent_id


@pytest.mark.parametrize("shares_stream", [False, True])
async def test_text_is_left_out_on_request(shares_stream: bool) -> None:
    async with server() as running, Client(running.address, NO_RETRIES, shares_stream=shares_stream) as client:
        request = GenerationRequest(TokenIds(PROMPTS[0]), omit_text=True)
        completion = await client.complete(request)
        assert completion.token_ids == continuation(PROMPTS[0], 30)
        assert completion.text == ""
        assert completion.finish.usage.accepted_count == sum(one.accepted for one in completion.tokens)


def call_of(stream: Stream) -> Any:
    return SimpleNamespace(stream=stream, deliver=lambda piece: None)


def test_a_call_with_more_than_a_message_holds_does_not_keep_others_waiting() -> None:
    """It stayed first, and where it got more faster than a reader took messages, the others got nothing."""
    many, one, outbox = Stream(output_count=2), Stream(), Outbox(1 << 20)
    for number, stream in enumerate((many, one), 1):
        outbox.send(number, call_of(stream))
    one.put(OutputPiece((OutputToken(5, "five", accepted=False),)))
    sent = []
    for _ in range(2):
        for output in range(2):
            many.put(OutputPiece((OutputToken(6, "six", accepted=False),) * MESSAGE_TOKENS, completion_index=output))
        message = outbox._next_message()
        assert message
        sent.append({update.call_id for update in message.updates})
    assert sent == [{1}, {1, 2}]


def test_what_a_call_has_ready_is_not_sent_once_it_is_held() -> None:
    stream, outbox = Stream(), Outbox(1 << 20)
    sending = outbox.send(1, call_of(stream))
    stream.put(OutputPiece((OutputToken(5, "five", accepted=False),)))
    outbox.hold(sending, True)
    assert outbox._next_message() is None
    outbox.hold(sending, False)
    assert (message := outbox._next_message()) and ids([message], 1) == [5]


TOO_MANY_FIELDS = pb.GenerateTextRequest(text="x", stop_strings=[""] * (MAX_FIELDS + 1)).SerializeToString()
NO_TEXT = pb.GenerateTextRequest(text="????").SerializeToString().replace(b"????", b"\xff\xff\xff\xff")


@pytest.mark.parametrize("request_", [TOO_MANY_FIELDS, NO_TEXT], ids=["too many fields", "no text"])
async def test_a_request_that_cannot_be_read_ends_its_own_call_alone(request_: bytes) -> None:
    """It ended the stream, and with it the calls of everybody else behind a gateway."""
    content = length_delimited(1, request_)
    unreadable = pb.GenerateStreamRequest(call_id=2).SerializeToString() + length_delimited(2, content)
    async with server() as running, open_channel(running.address) as channel:
        call: Any = channel.stream_stream(GENERATE_STREAM, response_deserializer=pb.GenerateStreamResponse.FromString)()
        stream = RawStream(call)
        started = pb.StartedCall(request=request_to_pb(GenerationRequest(TokenIds(PROMPTS[0]))))
        await call.write(pb.GenerateStreamRequest(call_id=1, start=started).SerializeToString())
        await call.write(unreadable)
        messages = await stream.read_until_ended([1, 2])
        assert ids(messages, 1) == continuation(PROMPTS[0], 30)
        (ended,) = [one.ended for message in messages for one in message.updates if one.call_id == 2]
        assert ended.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        call.cancel()


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_an_action_of_a_newer_caller_ends_its_own_call_alone(is_under_way: bool) -> None:
    """It ended the stream, and with it the calls of everybody else behind a gateway."""
    unknown = pb.GenerateStreamRequest(call_id=2).SerializeToString() + length_delimited(15, b"")
    endless = GenerationRequest(TokenIds(PROMPTS[1]), ignore_end_tokens=True)
    async with server(max_new_tokens=900) as running, open_channel(running.address) as channel:
        call: Any = channel.stream_stream(GENERATE_STREAM, response_deserializer=pb.GenerateStreamResponse.FromString)()
        stream = RawStream(call)
        requests = {1: GenerationRequest(TokenIds(PROMPTS[0]), 30), **({2: endless} if is_under_way else {})}
        for call_id, request in requests.items():
            started = pb.StartedCall(request=request_to_pb(request))
            await call.write(pb.GenerateStreamRequest(call_id=call_id, start=started).SerializeToString())
        await call.write(unknown)
        messages = await stream.read_until_ended([1, 2])
        assert ids(messages, 1) == continuation(PROMPTS[0], 30)
        (ended,) = [one.ended for message in messages for one in message.updates if one.call_id == 2 and one.ended.code]
        assert ended.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "upgrade" in ended.message
        call.cancel()


def length_delimited(number: int, content: bytes) -> bytes:
    """Return a field of a message, as protobuf writes it."""
    length, tag = len(content), number << 3 | 2
    groups = [length >> shift & 127 for shift in range(0, max(1, length.bit_length()), 7)]
    return bytes([tag, *(one | 128 for one in groups[:-1]), groups[-1]]) + content
