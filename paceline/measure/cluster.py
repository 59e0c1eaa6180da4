"""Our own services as a measured system: a cluster of processes, to which one client sends all requests at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from paceline.client import Client, describe_draft, describe_target
from paceline.measure.rounds import Counters, rounds_between
from paceline.measure.system import Measured
from paceline.process.launcher import Addresses, ClusterOptions, running_cluster
from paceline.types import GenerationRequest, ModelDescription, SamplingParameters, TokenIds

GREEDY_SAMPLING = SamplingParameters()
SEED = 1


class ClusterSystem:
    def __init__(
        self,
        client: Client,
        addresses: Addresses,
        max_new_tokens: int,
        max_draft_count: int | None = None,
        sampling: SamplingParameters = GREEDY_SAMPLING,
    ) -> None:
        """`max_draft_count` 0 decodes plainly. Sampled outputs are the same in every pass."""
        self._client = client
        self._addresses = addresses
        self._max_new_tokens = max_new_tokens
        self._max_draft_count = max_draft_count
        self._sampling = sampling

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        requests = [
            GenerationRequest(
                TokenIds(one),
                self._max_new_tokens,
                max_draft_count=self._max_draft_count,
                sampling=self._sampling,
                seed=SEED,
            )
            for one in prompts
        ]
        before = await self._counters()
        began = time.perf_counter()
        completions = await asyncio.gather(*map(self._client.complete, requests))
        elapsed_s = time.perf_counter() - began
        batch_size = (await self._client.describe()).batch_size
        rounds = rounds_between(before, await self._counters(), (one.finish.usage for one in completions), batch_size)
        return Measured([one.token_ids for one in completions], elapsed_s, rounds)

    async def models(self) -> tuple[ModelDescription, ModelDescription | None]:
        """Return what target and draft say of themselves; None without a draft service."""
        target = await describe_target(self._addresses.target)
        return target, await describe_draft(self._addresses.draft) if self._addresses.draft else None

    async def _counters(self) -> Counters:
        cluster, (target, draft) = await asyncio.gather(self._client.describe(), self.models())
        draft_realignment_s = draft.cache.realignment_s if draft else 0.0
        return Counters(cluster.statistics, draft_realignment_s, target.cache.realignment_s)


@asynccontextmanager
async def running_system(
    options: ClusterOptions, max_new_tokens: int, max_draft_count: int | None = None
) -> AsyncIterator[ClusterSystem]:
    """Run services while the block runs."""
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        yield ClusterSystem(client, addresses, max_new_tokens, max_draft_count)
