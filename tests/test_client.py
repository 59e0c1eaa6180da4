"""The client library: what it repeats, what it continues, and what it raises."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.errors import CallTimedOut, Overloaded, PeerUnavailable
from paceline.instruments import Instruments
from paceline.metrics import new_registry
from paceline.types import GenerationRequest, SamplingParameters, TokenIds, UserMessage
from tests.clusters import cluster, model_server
from tests.conftest import PairOfCheckpoints
from tests.proxy import running_proxy

QUICK = RetryPolicy(attempts=50, first_delay_s=0.05, max_delay_s=0.1)
PROMPT = TokenIds((20, 21, 22))


@pytest.mark.parametrize(
    "sampling",
    [SamplingParameters(), SamplingParameters(temperature=0.9, presence_penalty=0.4, min_new_tokens=20)],
    ids=["greedy", "sampled"],
)
async def test_a_stream_cut_again_and_again_continues_to_the_identical_output(
    sampling: SamplingParameters, pairs: dict[str, PairOfCheckpoints]
) -> None:
    request = GenerationRequest(PROMPT, 40, sampling=sampling, seed=11, ignore_end_tokens=True, top_logprob_count=1)
    async with cluster(pairs["Llama"].target, pairs["Llama"].draft, draft_count=2) as running:
        whole = await running.client.complete(request)
        async with running_proxy(running.coordinator_address) as proxy, Client(proxy.address, QUICK) as client:
            token_ids: list[int] = []
            async for piece in client.generate(request):
                token_ids += [token.token_id for token in piece.tokens]
                assert all(token.logprobs for token in piece.tokens)
                if proxy.cut_count < 3 and not piece.finish:
                    proxy.cut()
        assert proxy.cut_count >= 3
    assert token_ids == whole.token_ids
    assert piece.finish is not None
    assert piece.finish.usage.output_count == len(whole.token_ids)
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


async def test_a_coordinator_that_restarts_is_found_again(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs["Qwen3"]
    request = GenerationRequest(PROMPT, 40, ignore_end_tokens=True)
    async with model_server("target", pair.target) as target, model_server("draft", pair.draft) as draft:
        settings = CoordinatorSettings(draft=draft.address, target=target.address, draft_count=1, shutdown_grace_s=0.01)
        async with contextlib.AsyncExitStack() as first:
            server = await first.enter_async_context(
                running_coordinator(settings, Instruments(new_registry("coordinator")))
            )
            async with Client(server.address, QUICK) as client:
                whole = await client.complete(request)
                stream = client.generate(request)
                token_ids = [token.token_id for token in (await anext(stream)).tokens]
                await first.aclose()
                again = settings.model_copy(update={"port": int(server.address.rpartition(":")[2])})
                async with running_coordinator(again, Instruments(new_registry("coordinator"))):
                    async for piece in stream:
                        token_ids += [token.token_id for token in piece.tokens]
    assert token_ids == whole.token_ids


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


async def test_nobody_there_is_raised_after_the_attempts() -> None:
    async with Client("127.0.0.1:1", RetryPolicy(attempts=2, first_delay_s=0.01)) as client:
        with pytest.raises(PeerUnavailable):
            await client.complete(GenerationRequest(PROMPT))


async def test_the_deadline_covers_repeated_calls() -> None:
    async with Client("127.0.0.1:1", RetryPolicy(attempts=10**6, first_delay_s=60)) as client:
        with pytest.raises(CallTimedOut, match="did not end in time"):
            await client.complete(GenerationRequest(PROMPT), timeout_s=5)


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
            crowd = [asyncio.create_task(hasty.complete(long)) for _ in range(4)]
            outcomes = await asyncio.gather(*crowd, return_exceptions=True)
            assert any(isinstance(one, Overloaded) for one in outcomes)
