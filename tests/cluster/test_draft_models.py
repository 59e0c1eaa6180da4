"""Several real draft models behind one coordinator: each drafts for who names it, and they change under requests."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coordinator.drafting import guarded_draft
from paceline.client import Client
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, ReplicaState, SamplingParameters, TokenIds
from tests.checkpoints import write_related_draft
from tests.cluster.test_recovery import coordinating, disturbed, until_replica
from tests.clusters import ModelServer, held_up, model_server
from tests.conftest import PairOfCheckpoints
from tests.ports import port_for_later

REQUESTS = [
    GenerationRequest(TokenIds((20 + n, 21, 22)), 60, ignore_end_tokens=True, seed=n, sampling=sampling)
    for n, sampling in enumerate([SamplingParameters(), SamplingParameters(temperature=0.8)])
]


def naming(model: str) -> list[GenerationRequest]:
    """Return the requests for drafts of this model, or of any where it is empty."""
    drafting = DraftingOptions((DraftSource.DRAFT,), draft_model=model)
    return [replace(one, drafting=drafting) for one in REQUESTS]


@pytest.fixture
def drafts(pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write three models, which are right more and less often."""
    # On a busy machine a draft may be slower than it helps and not be asked for a while.
    monkeypatch.setattr(guarded_draft, "LATE_S", math.inf)
    target = pairs["Llama"].target
    return [
        str(write_related_draft(tmp_path / str(noise), target, "Llama", noise=noise)) for noise in (0.02, 0.04, 0.06)
    ]


@dataclass(frozen=True)
class Running:
    client: Client
    target: ModelServer
    first: AsyncExitStack
    """What stops the first draft service."""
    later: str
    """Address of a draft service that is not there yet."""

    async def outputs(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        return [one.token_ids for one in await asyncio.gather(*map(self.client.complete, requests))]

    async def drafted_counts(self) -> dict[str, int]:
        """Return the verified draft tokens of each draft model so far."""
        sources = (await self.client.describe()).statistics.sources
        return {one.model: one.drafted_count for one in sources if one.source is DraftSource.DRAFT}


@asynccontextmanager
async def coordinating_two(target: Path, drafts: Sequence[str]) -> AsyncIterator[Running]:
    later = f"127.0.0.1:{port_for_later()}"
    async with (
        model_server("target", target) as verifying,
        model_server("draft", drafts[1]) as second,
        AsyncExitStack() as stops,
    ):
        first = await stops.enter_async_context(model_server("draft", drafts[0]))
        addresses = ",".join((first.address, second.address, later))
        async with coordinating(verifying.address, addresses) as client:
            for one in (first, second):
                await until_replica(client, one.address, ReplicaState.UP)
            yield Running(client, verifying, stops, later)


async def test_a_request_that_names_its_draft_model_has_drafts_of_it_alone(
    pairs: dict[str, PairOfCheckpoints], drafts: list[str]
) -> None:
    async with coordinating_two(pairs["Llama"].target, drafts) as running:
        expected = await running.outputs([replace(one, max_draft_count=0) for one in REQUESTS])
        asked = [*naming(drafts[0]), *naming(drafts[1]), *naming("")]
        completions = await asyncio.gather(*map(running.client.complete, asked))
    assert [one.token_ids for one in completions] == 3 * expected
    for request, completion in zip(asked, completions, strict=True):
        found = completion.finish.usage.sources
        named = request.drafting.draft_model
        assert {one.model for one in found} <= ({named} if named else set(drafts[:2]))
        assert sum(one.accepted_count for one in found) > 0


async def test_one_draft_model_stops_and_another_joins_under_requests_and_no_output_changes(
    pairs: dict[str, PairOfCheckpoints], drafts: list[str]
) -> None:
    first, second, third = drafts
    async with coordinating_two(pairs["Llama"].target, drafts) as running, AsyncExitStack() as joins:

        async def swap() -> None:
            """The target waits meanwhile, so that no request ends before it."""
            async with held_up(running.target.worker):
                await running.first.aclose()
                port = int(running.later.rpartition(":")[2])
                await joins.enter_async_context(model_server("draft", third, port=port))
                await until_replica(running.client, running.later, ReplicaState.UP)

        expected = await running.outputs([replace(one, max_draft_count=0) for one in REQUESTS])
        assert await running.outputs(naming(first)) == expected
        asked = [*naming(first), *naming(third), *naming("")]
        assert await disturbed(running.client, swap, asked) == 3 * expected
        before = await running.drafted_counts()
        assert before[first] > 0 and before[third] > 0
        assert await running.outputs(asked) == 3 * expected
        after = await running.drafted_counts()
        assert (after[first], after[third] > before[third]) == (before[first], True)
