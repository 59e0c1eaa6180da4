"""Several coordinators on one pair of models: their calls share passes and the cache, and no output changes."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from threading import Event

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import Client
from paceline.engine.options import EngineOptions
from paceline.engine.runner import PassSize
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import GenerationRequest, SamplingParameters, TokenIds
from tests.checkpoints import VOCABULARY_SIZE
from tests.clusters import OPTIONS, ModelServer, cluster, model_server
from tests.conftest import PairOfCheckpoints

COUNT = 4
AMPLE, TIGHT = OPTIONS, EngineOptions(kv_memory=str(24 * 16 * 512), prefill_chunk_tokens=48)


@dataclass(frozen=True)
class Sharing:
    target: ModelServer
    draft: ModelServer
    clients: Sequence[Client]


@asynccontextmanager
async def sharing(pair: PairOfCheckpoints, options: EngineOptions) -> AsyncIterator[Sharing]:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(model_server("target", pair.target, options))
        draft = await stack.enter_async_context(model_server("draft", pair.draft, options))
        clients = []
        for _ in range(COUNT):
            settings = CoordinatorSettings(draft=draft.address, target=target.address, batch_size=2, draft_count=3)
            watched = Instruments(new_registry("coordinator"), None)
            server = await stack.enter_async_context(running_coordinator(settings, watched))
            clients.append(await stack.enter_async_context(Client(server.address)))
        yield Sharing(target, draft, clients)


def requests(count: int, length: int) -> list[GenerationRequest]:
    rng = random.Random(length)
    prompts = [tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)) for _ in range(count)]
    sampling = [SamplingParameters(temperature=number % 2) for number in range(count)]
    return [
        GenerationRequest(TokenIds(prompt), max_new_tokens=24, sampling=one, seed=7)
        for prompt, one in zip(prompts, sampling, strict=True)
    ]


async def outputs_alone(pair: PairOfCheckpoints, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    async with cluster(pair.target, pair.draft) as alone:
        return [(await alone.client.complete(one)).token_ids for one in asked]


async def outputs(running: Sharing, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    completions = [running.clients[number % COUNT].complete(one) for number, one in enumerate(asked)]
    return [one.token_ids for one in await asyncio.gather(*completions)]


async def test_calls_of_coordinators_that_wait_share_a_pass_and_no_output_changes(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    asked, go_on = requests(2 * COUNT, 12), Event()
    passes: list[PassSize] = []
    async with sharing(pairs["Llama"], AMPLE) as running:
        running.target.runner.on_pass = passes.append
        blocked = asyncio.create_task(running.target.worker.run(go_on.wait))
        answering = asyncio.create_task(outputs(running, asked))
        # Other work waits too, and second calls of one coordinator, which have a turn of their own.
        while len({one.caller for one in running.target.worker._queue.waiting() if one.call}) < COUNT:
            await asyncio.sleep(0.01)
        go_on.set()
        found = await answering
        await blocked
    assert passes[0].row_count >= COUNT
    assert found == await outputs_alone(pairs["Llama"], asked)


@pytest.mark.parametrize("length", [40, pytest.param(100, marks=pytest.mark.long)])
async def test_with_too_little_cache_for_all_no_output_changes_and_none_fails(
    pairs: dict[str, PairOfCheckpoints], length: int
) -> None:
    asked = requests(4 * COUNT, length)
    async with sharing(pairs["Llama"], TIGHT) as running:
        assert await outputs(running, asked) == await outputs_alone(pairs["Llama"], asked)
