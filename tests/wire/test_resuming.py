"""Outputs that lose their stream go on elsewhere, with the identical tokens and with the same model."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import Client, Completion, RetryPolicy
from paceline.codec.generation import accepted_from_pb, piece_from_pb, piece_to_pb, request_from_pb, request_to_pb
from paceline.errors import InvalidRequest, ModelChanged
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
from tests.fakes.proxy import running_proxy

QUICK = RetryPolicy(first_delay_s=0.05, max_delay_s=0.1)
PROMPT = TokenIds((20, 21, 22))
SAMPLED = SamplingParameters(temperature=0.9)
ONE, OTHER = "1" * 64, "2" * 64


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
