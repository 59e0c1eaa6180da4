"""Conversations with two real targets: each turn finds in the cache what was said before."""

import asyncio
from contextlib import AsyncExitStack

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import Client
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.process.variables import NO_DRAFT
from paceline.types import GenerationRequest, TokenIds
from tests.clusters import OPTIONS, model_server
from tests.conftest import PairOfCheckpoints


async def test_each_turn_computes_only_what_is_new(pairs: dict[str, PairOfCheckpoints]) -> None:
    page_tokens = OPTIONS.page_tokens
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(model_server("target", pairs["Llama"].target)) for _ in range(2)]
        addresses = ",".join(one.address for one in targets)
        settings = CoordinatorSettings(draft=NO_DRAFT, target=addresses, batch_size=8, startup_timeout_s=60)
        coordinator = await stack.enter_async_context(
            running_coordinator(settings, Instruments(new_registry("coordinator")))
        )
        client = await stack.enter_async_context(Client(coordinator.address))
        while len([one for one in (await client.describe()).targets if one.state.value == "up"]) < 2:
            await asyncio.sleep(0.05)
        for talk in range(4):
            said = tuple(range(20 + talk, 20 + talk + 2 * page_tokens))
            known_count = 0
            for _ in range(3):
                answer = await client.complete(GenerationRequest(TokenIds(said), 4, ignore_end_tokens=True))
                assert answer.finish.usage.cached_prompt_count >= known_count // page_tokens * page_tokens
                known_count, said = len(said), (*said, *answer.token_ids, *said[: page_tokens // 2])
