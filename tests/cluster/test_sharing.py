"""Several coordinators on the same models: their calls share passes and the cache, and no output changes."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.drafting import guarded_draft
from coordinator.serving import running_coordinator
from paceline.client import Client
from paceline.engine.options import EngineOptions
from paceline.engine.runner import PassSize
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, SamplingParameters, TokenIds
from tests.checkpoints import VOCABULARY_SIZE, write_related_draft
from tests.clusters import OPTIONS, ModelServer, calls_of_callers, cluster, held_up, model_server
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
        clients = [await stack.enter_async_context(coordinating(target, draft)) for _ in range(COUNT)]
        yield Sharing(target, draft, clients)


@asynccontextmanager
async def coordinating(target: ModelServer, draft: ModelServer) -> AsyncIterator[Client]:
    settings = CoordinatorSettings(draft=draft.address, target=target.address, batch_size=2, draft_count=3)
    watched = Instruments(new_registry("coordinator"), None)
    async with running_coordinator(settings, watched) as server, Client(server.address) as client:
        yield client


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
    asked = requests(2 * COUNT, 12)
    passes: list[PassSize] = []
    async with sharing(pairs["Llama"], AMPLE) as running:
        running.target.runner.on_pass = passes.append
        async with held_up(running.target.worker):
            answering = asyncio.create_task(outputs(running, asked))
            await calls_of_callers(running.target.worker, COUNT)
        found = await answering
    assert passes[0].row_count >= COUNT
    assert found == await outputs_alone(pairs["Llama"], asked)


@pytest.mark.parametrize("length", [40, pytest.param(100, marks=pytest.mark.long)])
async def test_with_too_little_cache_for_all_no_output_changes_and_none_fails(
    pairs: dict[str, PairOfCheckpoints], length: int
) -> None:
    asked = requests(4 * COUNT, length)
    async with sharing(pairs["Llama"], TIGHT) as running:
        assert await outputs(running, asked) == await outputs_alone(pairs["Llama"], asked)


async def test_one_draft_service_drafts_for_two_targets_and_each_keeps_its_own_output(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets have one vocabulary and other weights; those of the draft lie between them."""
    # The first passes of the draft wait for both coordinators: that they are late tells nothing.
    monkeypatch.setattr(guarded_draft, "LATE_S", math.inf)
    own, others = pairs["Llama"].target, pairs["Llama"].draft
    between = write_related_draft(tmp_path / "between", own, "Llama", noise=0.025)
    drafted = [replace(one, drafting=DraftingOptions((DraftSource.DRAFT,))) for one in requests(COUNT, 12)]
    plain = [replace(one, max_draft_count=0) for one in drafted]
    async with AsyncExitStack() as stack:
        draft = await stack.enter_async_context(model_server("draft", between, OPTIONS))
        targets = [await stack.enter_async_context(model_server("target", one, OPTIONS)) for one in (own, others)]
        clients = [await stack.enter_async_context(coordinating(one, draft)) for one in targets]
        expected = [[(await client.complete(one)).token_ids for one in plain] for client in clients]
        async with held_up(draft.worker):
            answering = [asyncio.create_task(client.complete(one)) for client in clients for one in drafted]
            await calls_of_callers(draft.worker, len(clients))
        completions = await asyncio.gather(*answering)
    parts = completions[:COUNT], completions[COUNT:]
    assert [[one.token_ids for one in part] for part in parts] == expected
    assert all(mine != theirs for mine, theirs in zip(*expected, strict=True))
    for part in parts:
        assert sum(one.finish.usage.accepted_count for one in part) > len(part)
