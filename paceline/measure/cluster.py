"""Our own services as a measured system: a cluster of processes, to which one client sends all requests at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy

from paceline.client import Client, describe_draft, describe_target
from paceline.measure.rounds import Counters, rounds_between
from paceline.measure.source_sets import ALL_SOURCES, SourceSet
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import Addresses, running_cluster
from paceline.types import (
    DraftingOptions,
    GenerationRequest,
    ModelDescription,
    Prediction,
    SamplingParameters,
    TokenIds,
)

Predictions = Mapping[tuple[int, ...], Prediction]
"""Expected outputs by prompt, for the prompts that have one."""
GREEDY_SAMPLING = SamplingParameters()
SEED = 1


class ClusterSystem:
    def __init__(
        self,
        client: Client,
        addresses: Addresses,
        max_new_tokens: int,
        max_draft_count: int | None = None,
        sources: SourceSet = ALL_SOURCES,
        predictions: Predictions | None = None,
        sampling: SamplingParameters = GREEDY_SAMPLING,
    ) -> None:
        """`max_draft_count` 0 decodes plainly. Sampled outputs are the same in every pass."""
        self._client = client
        self._addresses = addresses
        self._max_new_tokens = max_new_tokens
        self._max_draft_count = max_draft_count
        self._sources = sources
        self._predictions = predictions or {}
        self._sampling = sampling

    def with_limit(self, max_new_tokens: int) -> "ClusterSystem":
        """Return the same services, asked for outputs of at most so many tokens."""
        limited = copy(self)
        limited._max_new_tokens = max_new_tokens
        return limited

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        requests = list(map(self._request, prompts))
        before = await self._counters()
        began = time.perf_counter()
        completions = await asyncio.gather(*map(self._client.complete, requests))
        elapsed_s = time.perf_counter() - began
        batch_size = (await self._client.describe()).batch_size
        usages = tuple(one.finish.usage for one in completions)
        rounds = rounds_between(before, await self._counters(), usages, batch_size)
        return Measured([one.token_ids for one in completions], elapsed_s, rounds, usages=usages)

    def _request(self, prompt: tuple[int, ...]) -> GenerationRequest:
        return GenerationRequest(
            TokenIds(prompt),
            self._max_new_tokens,
            max_draft_count=self._max_draft_count,
            sampling=self._sampling,
            seed=SEED,
            drafting=DraftingOptions(self._sources),
            predicted_output=self._predictions.get(prompt),
        )

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
    options: ClusterOptions,
    max_new_tokens: int,
    max_draft_count: int | None = None,
    sources: SourceSet = ALL_SOURCES,
    predictions: Predictions | None = None,
    sampling: SamplingParameters = GREEDY_SAMPLING,
) -> AsyncIterator[ClusterSystem]:
    """Run services while the block runs."""
    async with running_cluster(options) as addresses, Client(addresses.coordinator, shares_stream=True) as client:
        yield ClusterSystem(client, addresses, max_new_tokens, max_draft_count, sources, predictions, sampling)
