"""The client library: outages, deadlines, full coordinators, and errors."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.errors import CallTimedOut, InvalidRequest, Overloaded, PeerFailed, PeerUnavailable, StartupError
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.shared_stream import SharedStream
from paceline.types import GenerationAccepted, GenerationRequest, Prompt, ReceivedOutput, SamplingParameters, TokenIds
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from paceline.wire import running_server
from tests.clusters import cluster, model_server
from tests.conftest import PairOfCheckpoints
from tests.coordinators import fake_server
from tests.fakes.frames import ANSWER, DATA, END_OF_HEADERS, HEADERS, PING, RESET, SETTINGS, frame
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation
from tests.fakes.proxy import Proxy, running_proxy, silent_peer
from tests.services import PATIENT

PROMPT = TokenIds((20, 21, 22))


async def _no_pause() -> None: ...


class OutageTime:
    """A clock that only pauses advance, and an outage of the proxy's connections that ends by this clock."""

    def __init__(self, proxy: Proxy, until_s: float) -> None:
        self.now_s = 0.0
        self.reconnected: Callable[[], Awaitable[None]] = _no_pause
        """Waits until the client has a connection again: pauses of gRPC's own are real ones."""
        self._proxy = proxy
        self._until_s = until_s

    def begin(self) -> None:
        self._proxy.refuses = True
        self._proxy.cut()

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s
        if self._proxy.refuses and self.now_s >= self._until_s:
            self._proxy.refuses = False
            await self.reconnected()


@pytest.mark.review
async def test_the_default_client_survives_an_outage_of_60_s() -> None:
    """Review C13: outages of at most 3.0 s were survived."""
    verifier = HeldVerifier(1)
    async with (
        fake_server(FakeDrafter(0.7), verifier, CollectorRegistry()) as server,
        running_proxy(server.address) as proxy,
    ):
        time = OutageTime(proxy, 60)
        async with Client(proxy.address, clock=lambda: time.now_s, sleep=time.sleep) as client:
            stream = client.generate(GenerationRequest(PROMPT, 30))
            token_ids = [token.token_id for token in (await anext(stream)).tokens]
            time.reconnected = client._channels[0].channel_ready
            time.begin()
            verifier.open.set()
            token_ids += [token.token_id async for piece in stream for token in piece.tokens]
    assert time.now_s >= 60
    assert token_ids == continuation(PROMPT.values, 30)


async def test_without_retries_a_broken_stream_is_raised(pairs: dict[str, PairOfCheckpoints]) -> None:
    request = GenerationRequest(PROMPT, 400, ignore_end_tokens=True)
    async with (
        cluster(pairs["Llama"].target, pairs["Llama"].draft, draft_count=0) as running,
        running_proxy(running.coordinator_address) as proxy,
        Client(proxy.address, NO_RETRIES) as client,
    ):
        with pytest.raises(PeerUnavailable):
            async for _ in client.generate(request):
                proxy.cut()


async def test_nobody_there_is_raised_when_the_time_is_up() -> None:
    async with Client("127.0.0.1:1", RetryPolicy(0.05)) as client:
        for call in (client.complete(GenerationRequest(PROMPT)), client.describe()):
            with pytest.raises(PeerUnavailable, match="could not be used for 0.05 s"):
                await call


async def test_the_deadline_covers_repeated_calls() -> None:
    async with Client("127.0.0.1:1", RetryPolicy(10**6)) as client:
        with pytest.raises(CallTimedOut, match="did not end in time"):
            await client.complete(GenerationRequest(PROMPT), timeout_s=0.3)


@pytest.mark.parametrize("shares_stream", [False, True])
async def test_an_output_that_does_not_end_in_time_names_the_time(shares_stream: bool) -> None:
    """It was "Stream removed (Deadline Exceeded)", or what was left of the time, with 17 digits."""
    async with (
        fake_server(FakeDrafter(0.7), HeldVerifier(0), CollectorRegistry()) as server,
        Client(server.address, shares_stream=shares_stream) as client,
    ):
        with pytest.raises(CallTimedOut, match=r"^the output did not end within 0\.3 s$"):
            await client.complete(GenerationRequest(PROMPT), timeout_s=0.3)


class Off(GenerationServiceServicer):
    """Like a machine that is off: no call is answered before its deadline."""

    def __init__(self) -> None:
        self.asked_count = 0

    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Any) -> pb.DescribeClusterResponse:
        self.asked_count += 1
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        raise AssertionError


@contextlib.asynccontextmanager
async def switched_off() -> AsyncIterator[tuple[Off, str]]:
    off = Off()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        add_GenerationServiceServicer_to_server(off, server)

    async with running_server("127.0.0.1", 0, [], add, grace_s=0) as server:
        yield off, server.address


async def test_a_coordinator_that_does_not_answer_is_away_and_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent coordinator raised the call's own failure; neither the next one nor a later time was tried."""
    monkeypatch.setattr("paceline.client.random.randrange", lambda count: 0)
    async with (
        switched_off() as (off, address),
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as server,
    ):
        async with Client(f"{address},{address},{server.address}", NO_RETRIES) as client:
            assert (await client.describe()).batch_size
            assert off.asked_count == 2
            await client.describe()
            assert off.asked_count == 2, "who answered is asked first"
        async with Client(f"{address},{address}", RetryPolicy(0.05, 0.01)) as client:
            with pytest.raises(PeerUnavailable, match=f"{address} did not answer within 10 s"):
                await client.describe_once()
            assert off.asked_count == 4
            with pytest.raises(PeerUnavailable, match=f"could not be used for 0.05 s: {address} did not answer"):
                await client.describe()


class Silent(GenerationServiceServicer):
    """Ends every stream as if it were complete."""

    async def GenerateText(
        self, request: pb.GenerateTextRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTextResponse]:
        yield pb.GenerateTextResponse(accepted=pb.GenerationAccepted(seed=request.seed))


@contextlib.asynccontextmanager
async def resetting_proxy(code: int) -> AsyncIterator[str]:
    """Serve HTTP/2 as a proxy whose other side is lost: it answers with headers, then resets the stream."""
    fields = b"\x88" + b"\x00\x0ccontent-type\x10application/grpc"
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.readexactly(24)  # the preface
            writer.write(frame(SETTINGS, 0, 0))
            while True:
                head = await reader.readexactly(9)
                content, kind, stream = await reader.readexactly(int.from_bytes(head[:3])), head[3], head[5:]
                if kind in (SETTINGS, PING) and head[4] != ANSWER:
                    writer.write(frame(kind, ANSWER, 0, content if kind == PING else b""))
                elif kind == HEADERS:
                    writer.write(frame(HEADERS, END_OF_HEADERS, int.from_bytes(stream), fields))
                elif kind == DATA:
                    writer.write(frame(RESET, 0, int.from_bytes(stream), code.to_bytes(4)))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize("code", [0, 2], ids=["no error", "internal error"])
@pytest.mark.parametrize("shares_stream", [False, True])
async def test_a_stream_that_a_proxy_resets_is_taken_up_elsewhere(shares_stream: bool, code: int) -> None:
    """gRPC says UNKNOWN or INTERNAL of it, which was taken for a failure of the coordinator's."""
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as server,
        resetting_proxy(code) as proxy,
        Client(f"{proxy},{server.address}", shares_stream=shares_stream) as client,
    ):
        client._next = 0
        assert (await client.complete(GenerationRequest(PROMPT, 30))).token_ids == continuation(PROMPT.values, 30)


async def test_a_stream_that_ends_without_a_finish_is_a_failure() -> None:
    def add(server: grpc.aio.Server) -> None:
        add_GenerationServiceServicer_to_server(Silent(), server)  # type: ignore[abstract]

    async with running_server("127.0.0.1", 0, [], add, grace_s=0) as server, Client(server.address) as client:
        with pytest.raises(PeerFailed, match="ended without a finish"):
            async for _ in client.generate(GenerationRequest(PROMPT)):
                pass


@pytest.mark.review
async def test_more_outputs_than_there_are_places_ever_is_wrong_and_not_for_later(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """Review C13: more outputs than places and queue together were "try again" for ever."""
    pair = pairs["Llama"]
    request = GenerationRequest(PROMPT, 4, sampling=SamplingParameters(temperature=0.9), ignore_end_tokens=True)
    async with model_server("target", pair.target) as target, model_server("draft", pair.draft) as draft:
        settings = CoordinatorSettings(draft=draft.address, target=target.address, batch_size=2, lanes=1, queue_limit=3)
        async with (
            running_coordinator(settings, Instruments(new_registry("coordinator"))) as server,
            Client(server.address) as client,
        ):
            assert len(await client.complete_all(replace(request, completion_count=5))) == 5
            with pytest.raises(InvalidRequest, match="completion_count is 6; .* room for 5 outputs") as refused:
                await client.complete_all(replace(request, completion_count=6))
    assert refused.value.field == "completion_count"


async def test_a_full_coordinator_is_asked_again_when_it_says(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs["Llama"]
    request = GenerationRequest(PROMPT, 20, ignore_end_tokens=True)
    async with model_server("target", pair.target) as target, model_server("draft", pair.draft) as draft:
        settings = CoordinatorSettings(draft=draft.address, target=target.address, batch_size=1, lanes=1, queue_limit=1)
        async with (
            running_coordinator(settings, Instruments(new_registry("coordinator"))) as server,
            Client(server.address, PATIENT) as patient,
            Client(server.address, NO_RETRIES) as hasty,
        ):
            results = await asyncio.gather(*(patient.complete(request) for _ in range(4)))
            assert len({tuple(one.token_ids) for one in results}) == 1
            long = replace(request, max_new_tokens=400)
            with pytest.raises(ExceptionGroup) as refused:
                async with asyncio.TaskGroup() as crowd:
                    for _ in range(4):
                        crowd.create_task(hasty.complete(long))
            assert refused.group_contains(Overloaded)


REQUEST = GenerationRequest(PROMPT, 4)


@pytest.mark.review
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (replace(REQUEST, max_new_tokens=2**31), "max_new_tokens"),
        (replace(REQUEST, max_new_tokens=cast(int, 4.5)), "max_new_tokens"),
        (replace(REQUEST, seed=-1), "seed"),
        (replace(REQUEST, prompt=TokenIds((2**31,))), "token_ids"),
        (replace(REQUEST, prompt=cast(Prompt, "words")), "prompt"),
        (replace(REQUEST, stop_strings=cast(tuple[str], (7,))), "stop_strings"),
        (replace(REQUEST, sampling=SamplingParameters(top_k=2**31)), "sampling.top_k"),
        (replace(REQUEST, sampling=SamplingParameters(temperature=cast(float, "hot"))), "sampling.temperature"),
        (replace(REQUEST, received_outputs=(ReceivedOutput(1, (2**31,)),)), "received_outputs"),
    ],
)
async def test_a_value_that_no_call_can_carry_is_refused_by_its_name(request_: GenerationRequest, field: str) -> None:
    """Review C14: protobuf's own errors came out."""
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match=f"{field.rpartition('.')[2]} is .*; give ") as refused:
            await client.complete(request_)
    assert refused.value.field == field


@pytest.mark.review
@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, 1e12])
async def test_a_time_too_long_for_a_call_is_refused_and_not_taken_for_over(timeout_s: float) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequest, match="timeout_s is .*; give at most .* or None"):
            await client.complete(REQUEST, timeout_s=timeout_s)


@pytest.mark.parametrize("shares_stream", [False, True])
async def test_a_client_of_a_coordinator_that_never_answers_can_be_closed(shares_stream: bool) -> None:
    """It waited for ever to tell that coordinator of a request that had been given up, and a gateway never stopped."""
    async with silent_peer() as address, Client(address, NO_RETRIES, shares_stream=shares_stream) as client:
        asked = asyncio.create_task(client.complete(REQUEST))
        for _ in range(10):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
    assert asked.cancelled()


class _TakesNothing:
    """A stream of a coordinator that reads nothing, so that writes wait."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()

    async def read(self) -> object:
        await self._over.wait()
        return grpc.aio.EOF

    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        self._over.set()


async def test_who_waits_to_send_a_request_when_the_client_is_closed_gets_an_error_and_is_not_cancelled() -> None:
    """A task that nobody cancelled ended as if somebody had, and so did what waited for it."""
    stream = _TakesNothing()
    stub = cast(GenerationServiceStub, SimpleNamespace(GenerateStream=lambda metadata: stream))
    shared = SharedStream(stub, lambda: ())
    asked = [asyncio.create_task(anext(shared.call(pb.GenerateTextRequest(), None, {}))) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    await shared.close()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in ends] == [PeerUnavailable] * 3


@pytest.mark.review
@pytest.mark.parametrize("shares_stream", [False, True])
async def test_a_client_that_was_closed_says_so_and_does_not_try_again(shares_stream: bool) -> None:
    """Review C14: gRPC's own error came out."""
    client = Client("127.0.0.1:1", RetryPolicy(10**6), shares_stream=shares_stream)
    async with client:
        pass
    for call in (client.complete(REQUEST), client.describe()):
        with pytest.raises(PeerUnavailable, match="Channel is closed"):
            await call


def test_a_client_that_is_made_where_no_loop_runs_says_so() -> None:
    """Its calls failed with words of asyncio's, or never ended."""
    with pytest.raises(StartupError, match="no event loop runs here; make a client in a coroutine"):
        Client("127.0.0.1:1")


@pytest.mark.parametrize("shares_stream", [False, True])
def test_a_client_of_another_loop_says_so(shares_stream: bool) -> None:
    async def made() -> Client:
        async with Client("127.0.0.1:1", shares_stream=shares_stream) as client:
            return client

    async def use(client: Client) -> None:
        for call in (client.complete(REQUEST), client.describe()):
            with pytest.raises(StartupError, match="belongs to another event loop; make one in each"):
                await call

    asyncio.run(use(asyncio.run(made())))


@pytest.mark.parametrize("shares_stream", [False, True])
async def test_the_names_of_headers_may_be_written_as_http_shows_them(shares_stream: bool) -> None:
    """They were passed over on a shared stream, and refused by gRPC elsewhere."""
    accepted: list[GenerationAccepted] = []
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as server,
        Client(server.address, NO_RETRIES, shares_stream=shares_stream) as client,
    ):
        async for _ in client.generate(REQUEST, on_accepted=accepted.append, headers={"X-Request-Id": "mine"}):
            pass
    assert [one.request_id for one in accepted] == ["mine"]
