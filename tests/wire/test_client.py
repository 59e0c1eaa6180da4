"""The client library: retries, resumed outputs, and errors."""

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client, Completion, RetryPolicy
from paceline.codec.generation import accepted_from_pb, piece_from_pb, piece_to_pb, request_from_pb, request_to_pb
from paceline.errors import CallTimedOut, InvalidRequest, ModelChanged, Overloaded, PeerFailed, PeerUnavailable
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import (
    DraftingOptions,
    DraftSource,
    FinishReason,
    GenerationAccepted,
    GenerationFinish,
    GenerationRequest,
    ModelIdentity,
    OutputPiece,
    OutputToken,
    Prompt,
    ReceivedOutput,
    SamplingParameters,
    TokenIds,
    Usage,
    UserMessage,
)
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from paceline.wire import RunningServer, open_channel, running_server
from tests.clusters import cluster, model_server
from tests.conftest import PairOfCheckpoints
from tests.coordinators import fake_cluster, fake_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation
from tests.fakes.proxy import Proxy, running_proxy

QUICK = RetryPolicy(first_delay_s=0.05, max_delay_s=0.1)
PROMPT = TokenIds((20, 21, 22))
SAMPLED = SamplingParameters(temperature=0.9)


class Outputs:
    def __init__(self) -> None:
        self.token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, GenerationFinish] = {}

    def add(self, piece: OutputPiece) -> None:
        assert piece.completion_index not in self.finishes
        self.token_ids[piece.completion_index] += [token.token_id for token in piece.tokens]
        if piece.finish:
            self.finishes[piece.completion_index] = piece.finish

    def assert_equal(self, whole: list[Completion]) -> None:
        assert dict(self.token_ids) == {index: one.token_ids for index, one in enumerate(whole)}
        for index, one in enumerate(whole):
            found, expected = self.finishes[index], one.finish
            assert (found.reason, found.seed) == (expected.reason, expected.seed)
            assert found.usage.output_count == expected.usage.output_count == len(one.token_ids)


@pytest.mark.parametrize(
    ("sampling", "completion_count"),
    [
        (SamplingParameters(), 1),
        (SamplingParameters(temperature=0.9, presence_penalty=0.4, min_new_tokens=20), 1),
        (SAMPLED, 3),
    ],
    ids=["greedy", "sampled", "several"],
)
async def test_a_stream_cut_again_and_again_continues_to_the_identical_output(
    sampling: SamplingParameters, completion_count: int, pairs: dict[str, PairOfCheckpoints]
) -> None:
    request = GenerationRequest(
        PROMPT,
        40,
        sampling=sampling,
        seed=11,
        ignore_end_tokens=True,
        top_logprob_count=1,
        completion_count=completion_count,
    )
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft, draft_count=2) as running:
        whole = await running.client.complete_all(request)
        async with running_proxy(running.coordinator_address) as proxy, Client(proxy.address, QUICK) as client:
            outputs = Outputs()
            async for piece in client.generate(request):
                outputs.add(piece)
                assert all(token.logprobs for token in piece.tokens)
                if proxy.cut_count < 3 and not piece.finish:
                    proxy.cut()
        assert proxy.cut_count >= 3
    outputs.assert_equal(whole)
    assert running.held_sequence_count == 0


@pytest.mark.slow
async def test_text_and_stop_strings_survive_a_cut() -> None:
    request = GenerationRequest(UserMessage("A box holds 6 eggs. How many eggs are in 4 boxes?"), 60, ("Answer:",))
    async with cluster("builtin:target", "builtin:draft", draft_count=1) as running:
        whole = await running.client.complete(request)
        async with running_proxy(running.coordinator_address) as proxy, Client(proxy.address, QUICK) as client:
            text = ""
            async for piece in client.generate(request):
                text += "".join(token.text for token in piece.tokens)
                if proxy.cut_count < 5 and not piece.finish:
                    proxy.cut()
    assert text == whole.text
    assert "Answer:" not in text


@pytest.mark.review
@pytest.mark.parametrize("completion_count", [1, 8])
async def test_outputs_that_lose_their_coordinator_midway_go_on_identically_at_the_next(
    completion_count: int, pairs: dict[str, PairOfCheckpoints]
) -> None:
    """Review C13: several outputs were not resumed."""
    pair = pairs["Qwen3"]
    request = GenerationRequest(PROMPT, 80, ignore_end_tokens=True, sampling=SAMPLED, seed=3)
    async with model_server("target", pair.target) as target, model_server("draft", pair.draft) as draft:
        settings = CoordinatorSettings(draft=draft.address, target=target.address, draft_count=1, shutdown_grace_s=0.01)
        async with contextlib.AsyncExitStack() as first:
            server = await first.enter_async_context(
                running_coordinator(settings, Instruments(new_registry("coordinator")))
            )
            async with Client(server.address, QUICK) as client:
                # Some outputs must end before that, in the middle of others.
                stop = (await client.complete(request)).token_ids[40]
                request = replace(request, stop_token_ids=(stop,), completion_count=completion_count)
                whole = await client.complete_all(request)
                outputs, stream = Outputs(), client.generate(request)
                while not outputs.finishes and len(outputs.token_ids[0]) < 20:
                    outputs.add(await anext(stream))
                await first.aclose()
                assert len(outputs.finishes) < completion_count
                again = settings.model_copy(update={"port": int(server.address.rpartition(":")[2])})
                async with running_coordinator(again, Instruments(new_registry("coordinator"))):
                    async for piece in stream:
                        outputs.add(piece)
    outputs.assert_equal(whole)


@pytest.mark.review
async def test_any_client_can_continue_a_stream_it_gave_no_seed(pairs: dict[str, PairOfCheckpoints]) -> None:
    """Review G7: the seed came with the finish only."""
    request = GenerationRequest(PROMPT, 40, ignore_end_tokens=True, sampling=SAMPLED, completion_count=3)
    async with (
        cluster(pairs["Llama"].target, pairs["Llama"].draft) as running,
        open_channel(running.coordinator_address) as channel,
    ):
        generate, outputs = GenerationServiceStub(channel).GenerateText, Outputs()
        call = generate(request_to_pb(request))
        messages = aiter(call)
        seed = (await anext(messages)).accepted.seed
        while len(outputs.token_ids) < 2:
            outputs.add(piece_from_pb(await anext(messages)))
        call.cancel()
        received = tuple(ReceivedOutput(index, tuple(one)) for index, one in outputs.token_ids.items())
        request = replace(request, seed=seed)
        async for message in generate(request_to_pb(replace(request, received_outputs=received))):
            if message.HasField("accepted"):
                assert (message.accepted.seed, message.accepted.prompt_count) == (seed, 3)
            else:
                outputs.add(piece_from_pb(message))
        outputs.assert_equal(await running.client.complete_all(request))


def serving(model_digest: str, verifier: FakeVerifier) -> contextlib.AbstractAsyncContextManager[RunningServer]:
    verifier.description = replace(verifier.description, identity=ModelIdentity(model_digest, "process"))
    return fake_server(FakeDrafter(0.7), verifier, CollectorRegistry())


ONE, OTHER = "1" * 64, "2" * 64


@pytest.mark.review
async def test_a_client_is_told_the_model_and_another_refuses_to_go_on_with_it() -> None:
    """Review C1"""
    async with serving(ONE, FakeVerifier()) as server, open_channel(server.address) as channel:
        call = GenerationServiceStub(channel).GenerateText(request_to_pb(GenerationRequest(PROMPT, 4, seed=1)))
        accepted = (await anext(aiter(call))).accepted
        assert accepted.model_digest == ONE
        call.cancel()
        async with Client(server.address) as client:
            request = GenerationRequest(PROMPT, 4, received_outputs=(ReceivedOutput(0, (5,)),), seed=1)
            assert await client.complete(replace(request, model_digest=ONE))
            words = "model_digest is '222222222222', .* target with digest '111111111111' is served now; leave both out"
            with pytest.raises(ModelChanged, match=words):
                await client.complete(replace(request, model_digest=OTHER))
    async with fake_cluster(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as of_old_services:
        assert await of_old_services.complete(replace(request, model_digest=OTHER))


async def test_what_goes_on_on_another_day_says_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template may write the date into the prompt, which would be another prompt then."""
    days = count(86_400, 86_400)
    monkeypatch.setattr("coordinator.door.admission.now_s", lambda: next(days))
    told: list[int] = []
    server = fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry())
    async with server as running, running_proxy(running.address) as proxy, Client(proxy.address, QUICK) as client:
        request = GenerationRequest(PROMPT, 200, ignore_end_tokens=True)
        async for piece in client.generate(request, on_accepted=lambda one: told.append(one.prompt_time_s)):
            if proxy.cut_count < 2 and not piece.finish:
                proxy.cut()
        await client.complete(request)
    assert len(told) > 1
    assert set(told) == {86_400}
    assert next(days) == 3 * 86_400


async def test_what_goes_on_elsewhere_has_the_limit_that_it_began_with() -> None:
    first, other = (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), max_new_tokens=most) for most in (90, 70)
    )
    async with (
        first as one,
        other as another,
        running_proxy(one.address) as proxy,
        Client(proxy.address, QUICK) as client,
    ):
        token_ids: list[int] = []
        async for piece in client.generate(GenerationRequest(PROMPT, ignore_end_tokens=True)):
            token_ids += [token.token_id for token in piece.tokens]
            if not proxy.cut_count:
                proxy.lead_to(another.address)
                proxy.cut()
    assert proxy.cut_count and len(token_ids) == 90


@pytest.mark.review
@pytest.mark.parametrize("received_something", [True, False])
async def test_an_output_never_mixes_two_models(received_something: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review C1: the output continued at any coordinator that answered. A request without tokens begins anew."""
    accepted = asyncio.Event()

    def noted(message: pb.GenerationAccepted) -> GenerationAccepted:
        accepted.set()
        return accepted_from_pb(message)

    monkeypatch.setattr("paceline.client.accepted_from_pb", noted)
    first, other = HeldVerifier(1 if received_something else 0), FakeVerifier()
    async with (
        serving(ONE, first) as server,
        serving(OTHER, other) as another,
        running_proxy(server.address) as proxy,
        Client(proxy.address, QUICK) as client,
    ):
        stream = client.generate(GenerationRequest(PROMPT, 30))
        piece = asyncio.ensure_future(anext(stream))
        await (piece if received_something else accepted.wait())
        proxy.lead_to(another.address)
        proxy.cut()
        if received_something:
            with pytest.raises(ModelChanged):
                await anext(stream)
            assert not other.calls
        else:
            rest = [await piece, *[one async for one in stream]]
            assert [token.token_id for one in rest for token in one.tokens] == continuation(PROMPT.values, 30)
        await stream.aclose()
        first.open.set()


@pytest.mark.review
async def test_an_output_goes_on_where_its_model_is_served_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review C2: the first coordinator of another model ended the output."""
    monkeypatch.setattr("paceline.client.random.randrange", lambda count: 0)
    first, other, second = HeldVerifier(1), FakeVerifier(), FakeVerifier()
    async with (
        serving(ONE, first) as server,
        serving(OTHER, other) as another,
        serving(ONE, second) as last,
        running_proxy(server.address) as proxy,
        Client(f"{proxy.address},{another.address},{last.address}", QUICK) as client,
    ):
        stream = client.generate(GenerationRequest(PROMPT, 30))
        pieces = [await anext(stream)]
        proxy.refuses = True
        proxy.cut()
        pieces += [one async for one in stream]
        first.open.set()
    assert [token.token_id for one in pieces for token in one.tokens] == continuation(PROMPT.values, 30)
    assert second.calls
    assert not other.calls


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


async def test_a_stream_that_ends_without_a_finish_is_a_failure() -> None:
    def add(server: grpc.aio.Server) -> None:
        add_GenerationServiceServicer_to_server(Silent(), server)  # type: ignore[abstract]

    async with running_server("127.0.0.1", 0, [], add, grace_s=0) as server, Client(server.address) as client:
        with pytest.raises(PeerFailed, match="ended without a finish"):
            async for _ in client.generate(GenerationRequest(PROMPT)):
                pass


class Breaking(GenerationServiceServicer):
    """Breaks the first stream after a token, and ends the next; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def GenerateText(
        self, request: pb.GenerateTextRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTextResponse]:
        self.asked.append(request_from_pb(request))
        token = OutputToken(5, "", accepted=False)
        yield piece_to_pb(OutputPiece((token,), prompt_tokens=(token,) if self.asked[-1].echo_prompt else ()))
        if len(self.asked) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield piece_to_pb(OutputPiece((), GenerationFinish(FinishReason.LENGTH, Usage(3, 2))))


async def test_what_a_request_says_of_drafts_is_said_again_when_it_is_resumed() -> None:
    drafting = DraftingOptions((DraftSource.PREDICTION, DraftSource.SUFFIX), True, (DraftSource.DRAFT,), "small")
    request = GenerationRequest(PROMPT, 2, drafting=drafting, predicted_output=TokenIds((5, 6)))
    first, again = await asked_of_breaking(request)
    assert again.received_outputs == (ReceivedOutput(0, (5,)),)
    assert replace(again, received_outputs=()) == first == replace(request, seed=first.seed)


async def test_a_prompt_that_was_sent_back_is_not_asked_for_again() -> None:
    asked = await asked_of_breaking(GenerationRequest(PROMPT, 2, echo_prompt=True))
    assert [one.echo_prompt for one in asked] == [True, False]


async def asked_of_breaking(request: GenerationRequest) -> list[GenerationRequest]:
    """Return what a server that breaks the stream once was asked."""
    breaking = Breaking()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        add_GenerationServiceServicer_to_server(breaking, server)

    async with running_server("127.0.0.1", 0, [], add, grace_s=0) as server, Client(server.address, QUICK) as client:
        await client.complete(request)
    return breaking.asked


async def test_what_cannot_have_been_received_is_refused_and_not_mended_by_the_client() -> None:
    """A seed drawn for the rest would change the output."""
    request = GenerationRequest(PROMPT, 20, received_outputs=(ReceivedOutput(0, (5,)),))
    async with fake_cluster(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as client:
        with pytest.raises(InvalidRequest, match="give the seed"):
            await client.complete(request)
        with pytest.raises(InvalidRequest, match="output 0 twice"):
            await client.complete(replace(request, seed=1, received_outputs=request.received_outputs * 2))


@pytest.mark.review
async def test_more_outputs_than_there_are_places_ever_is_wrong_and_not_for_later(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    """Review C13: more outputs than places and queue together were "try again" for ever."""
    pair = pairs["Llama"]
    request = GenerationRequest(PROMPT, 4, sampling=SAMPLED, ignore_end_tokens=True)
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
            Client(server.address, QUICK) as patient,
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


@pytest.mark.review
async def test_a_client_that_was_closed_says_so_and_does_not_try_again() -> None:
    """Review C14: gRPC's own error came out."""
    client = Client("127.0.0.1:1", RetryPolicy(10**6))
    async with client:
        pass
    for call in (client.complete(REQUEST), client.describe()):
        with pytest.raises(PeerUnavailable, match="Channel is closed"):
            await call
