"""Spans of calls over real gRPC: one on each side however the call ends, joined by the call's metadata."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry import baggage
from opentelemetry import context as contexts

from paceline.errors import InvalidRequest, PacelineError, PeerUnavailable
from paceline.observe.tracing import traced_calls, traced_channel, traced_requests
from paceline.security.access import Context
from paceline.v1 import draft_service_pb2, generation_service_pb2
from paceline.v1.draft_service_pb2_grpc import (
    DraftServiceServicer,
    DraftServiceStub,
    add_DraftServiceServicer_to_server,
)
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from paceline.wire import Exchange, Exchanges, open_channel, running_server, translated_errors
from tests.spans import Spans

PROPOSE = "/paceline.v1.DraftService/ProposeTokens"
SECRET = "the prompt that no span may hold"


class Servicer(DraftServiceServicer, GenerationServiceServicer):
    """Follows `ending`: answers, refuses, fails, or hangs until it is cancelled."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self.ending = "answer"
        self.entered = asyncio.Event()
        self.baggage: dict[str, object] = {}

    async def _behave(self) -> None:
        self.entered.set()
        self.baggage = dict(baggage.get_all())
        if self.ending == "refuse":
            raise InvalidRequest(f"{SECRET} is wrong", field="prompt")
        if self.ending == "fail":
            raise RuntimeError(SECRET)
        if self.ending == "hang":
            await asyncio.Event().wait()

    async def RollbackDraftSequences(
        self, request: draft_service_pb2.RollbackDraftSequencesRequest, context: Context
    ) -> draft_service_pb2.RollbackDraftSequencesResponse:
        await self._behave()
        return draft_service_pb2.RollbackDraftSequencesResponse()

    async def ProposeTokens(
        self, requests: AsyncIterator[draft_service_pb2.ProposeTokensRequest], context: Context
    ) -> AsyncIterator[draft_service_pb2.ProposeTokensResponse]:
        async def answer(_: draft_service_pb2.ProposeTokensRequest) -> draft_service_pb2.ProposeTokensResponse:
            await self._behave()
            return draft_service_pb2.ProposeTokensResponse()

        async for response in self._exchanges.answers(PROPOSE, requests, answer):
            yield response

    async def DescribeDraftModel(
        self, request: draft_service_pb2.DescribeDraftModelRequest, context: Context
    ) -> draft_service_pb2.DescribeDraftModelResponse:
        return draft_service_pb2.DescribeDraftModelResponse()

    async def GenerateText(
        self, request: generation_service_pb2.GenerateTextRequest, context: Context
    ) -> AsyncIterator[generation_service_pb2.GenerateTextResponse]:
        yield generation_service_pb2.GenerateTextResponse()
        await self._behave()
        yield generation_service_pb2.GenerateTextResponse()


class Calls:
    """A served servicer and a channel to it, both traced."""

    def __init__(self, address: str, channel: grpc.aio.Channel, servicer: Servicer, spans: Spans) -> None:
        self.address, self.channel, self.servicer, self.spans = address, channel, servicer, spans
        self.exchange = Exchange(DraftServiceStub(channel).ProposeTokens)

    async def call(self, kind: str, timeout_s: float | None = None) -> None:
        """Make one call of any kind in a caller's span that carries baggage."""
        token = contexts.attach(baggage.set_baggage("tenant", "blue"))
        try:
            with self.spans.tracer.start_as_current_span("caller", record_exception=False), translated_errors():
                await getattr(self, f"_{kind}")(timeout_s)
        finally:
            contexts.detach(token)

    async def _unary(self, timeout_s: float | None) -> None:
        request = draft_service_pb2.RollbackDraftSequencesRequest()
        await DraftServiceStub(self.channel).RollbackDraftSequences(request, timeout=timeout_s)

    async def _exchange(self, timeout_s: float | None) -> None:
        await self.exchange.ask(draft_service_pb2.ProposeTokensRequest(), timeout_s or 60.0)

    async def _stream(self, timeout_s: float | None) -> None:
        request = generation_service_pb2.GenerateTextRequest(text=SECRET)
        call = GenerationServiceStub(self.channel).GenerateText(request, timeout=timeout_s)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()  # as the client library does: gRPC does not cancel with its reader at every moment


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    spans = Spans()
    servicer = Servicer(Exchanges(traced_requests(spans.tracer)))  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        add_DraftServiceServicer_to_server(servicer, server)
        add_GenerationServiceServicer_to_server(servicer, server)

    async with (
        running_server("127.0.0.1", 0, [], add, grace_s=0, admitted_interceptors=traced_calls(spans.tracer)) as server,
        open_channel(server.address, wrap=traced_channel(spans.tracer)) as channel,
    ):
        yield Calls(server.address, channel, servicer, spans)


METHODS = {
    "unary": "paceline.v1.DraftService/RollbackDraftSequences",
    "exchange": "paceline.v1.DraftService/ProposeTokens",
    "stream": "paceline.v1.GenerationService/GenerateText",
}
NAMES = {"unary": METHODS["unary"], "exchange": "draft.propose", "stream": "generate"}
every_kind = pytest.mark.parametrize("kind", ["unary", "exchange", "stream"])


async def check_pair(calls: Calls, kind: str, code: str, *, server_error: bool) -> None:
    """Check the caller's span, the client's under it and the server's under that, with one status."""
    (caller,) = calls.spans("caller")
    client = await calls.spans.one(NAMES[kind], "client")
    server = await calls.spans.one(NAMES[kind], "server")
    assert (client.parent_id, server.parent_id) == (caller.span_id, client.span_id)
    assert caller.trace_id == client.trace_id == server.trace_id
    for span in (client, server):
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == METHODS[kind]
        assert span.attributes["rpc.response.status_code"] == code
    assert client.attributes["server.address"] == "127.0.0.1"
    assert client.is_error is (code != "OK")
    assert server.is_error is server_error
    assert server.attributes.get("error.type") == (code if server_error else None)
    assert SECRET not in str(calls.spans())


@every_kind
async def test_an_answered_call_has_a_span_on_each_side_and_passes_baggage_on(calls: Calls, kind: str) -> None:
    await calls.call(kind)
    await check_pair(calls, kind, "OK", server_error=False)
    assert calls.servicer.baggage == {"tenant": "blue"}


@every_kind
async def test_a_refused_call_is_the_callers_error_and_not_the_servers(calls: Calls, kind: str) -> None:
    calls.servicer.ending = "refuse"
    with pytest.raises(InvalidRequest):
        await calls.call(kind)
    await check_pair(calls, kind, "INVALID_ARGUMENT", server_error=False)


@every_kind
async def test_an_unexpected_failure_is_an_error_on_both_sides(calls: Calls, kind: str) -> None:
    calls.servicer.ending = "fail"
    with pytest.raises(PacelineError):
        await calls.call(kind)
    await check_pair(calls, kind, "INTERNAL", server_error=True)


@every_kind
async def test_a_call_that_runs_out_of_time_says_so_on_both_sides(calls: Calls, kind: str) -> None:
    calls.servicer.ending = "hang"
    with pytest.raises(PacelineError):
        await calls.call(kind, timeout_s=1.234)
    await check_pair(calls, kind, "DEADLINE_EXCEEDED", server_error=True)


@every_kind
async def test_a_cancelled_call_reaches_the_server_and_ends_both_spans(calls: Calls, kind: str) -> None:
    calls.servicer.ending = "hang"
    task = asyncio.create_task(calls.call(kind, timeout_s=60))
    await calls.servicer.entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check_pair(calls, kind, "CANCELLED", server_error=False)


async def test_a_stream_that_its_reader_leaves_ends_both_spans(calls: Calls) -> None:
    calls.servicer.ending = "hang"
    with calls.spans.tracer.start_as_current_span("caller"):
        call = GenerationServiceStub(calls.channel).GenerateText(generation_service_pb2.GenerateTextRequest())
        async for _ in call:
            break
    call.cancel()
    await check_pair(calls, "stream", "CANCELLED", server_error=False)


@pytest.mark.parametrize("kind", ["unary", "exchange"])
async def test_a_call_that_reaches_nobody_is_unavailable_to_its_client(calls: Calls, kind: str) -> None:
    address = "127.0.0.1:1"
    async with open_channel(address, wrap=traced_channel(calls.spans.tracer)) as channel:
        with pytest.raises(PeerUnavailable):
            await Calls(address, channel, calls.servicer, calls.spans).call(kind)
    (client,) = calls.spans(NAMES[kind])
    assert client.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert client.is_error


async def test_a_stream_on_a_closed_channel_ends_its_span(calls: Calls) -> None:
    """It never ended, so no exporter got it."""
    stub = GenerationServiceStub(calls.channel)  # made before: gRPC crashes where it makes one of a closed channel
    await calls.channel.close()
    with pytest.raises(grpc.aio.UsageError):
        stub.GenerateText(generation_service_pb2.GenerateTextRequest())
    (client,) = calls.spans("generate")
    assert (client.attributes["rpc.response.status_code"], client.is_error) == ("UNKNOWN", True)


async def test_outside_a_trace_only_a_generation_begins_one(calls: Calls) -> None:
    stub = DraftServiceStub(calls.channel)
    await stub.DescribeDraftModel(draft_service_pb2.DescribeDraftModelRequest())
    await calls.exchange.ask(draft_service_pb2.ProposeTokensRequest(), 60.0)
    async for _ in GenerationServiceStub(calls.channel).GenerateText(generation_service_pb2.GenerateTextRequest()):
        pass
    server = await calls.spans.one("generate", "server")
    client = await calls.spans.one("generate", "client")
    assert client.parent_id is None
    assert server.parent_id == client.span_id
    assert len(calls.spans()) == 2


async def test_other_calls_inside_a_trace_have_their_full_name(calls: Calls) -> None:
    with calls.spans.tracer.start_as_current_span("caller"):
        await DraftServiceStub(calls.channel).DescribeDraftModel(draft_service_pb2.DescribeDraftModelRequest())
    await calls.spans.one("paceline.v1.DraftService/DescribeDraftModel", "server")


async def test_a_call_its_caller_does_not_sample_leaves_no_span(calls: Calls) -> None:
    async with open_channel(calls.address) as channel:
        metadata = (("traceparent", f"00-{1:032x}-{2:016x}-00"),)
        request = generation_service_pb2.GenerateTextRequest()
        async for _ in GenerationServiceStub(channel).GenerateText(request, metadata=metadata):
            pass
    # When the spans of a later traced call are there, those of the first call would be too.
    await calls.call("stream")
    await calls.spans.one("generate", "server")
    assert {span.trace_id for span in calls.spans()} == {calls.spans("caller")[0].trace_id}
