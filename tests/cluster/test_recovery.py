"""Real processes killed, paused and cut off at work: outputs stay the same, and nothing stays held."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client, Completion
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import (
    CircuitState,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    ReplicaState,
    SamplingParameters,
    TokenIds,
)
from tests.fakes.proxy import running_proxy
from tests.services import PATIENT, Models, running_services, until_freed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Disturb = Callable[[], Awaitable[None]]
REQUESTS = [
    GenerationRequest(TokenIds((20 + n, 21, 22)), 200, ignore_end_tokens=True, seed=n, sampling=sampling)
    for n, sampling in enumerate([SamplingParameters(), SamplingParameters(temperature=0.8)] * 2)
]
SEVERAL = replace(REQUESTS[1], max_new_tokens=100, completion_count=8)
Outputs = list[list[int]]


@asynccontextmanager
async def coordinating(target: str, draft: str, **settings: Any) -> AsyncIterator[Client]:
    """Run a coordinator here; none of its tasks is left after it has ended."""
    asked = CoordinatorSettings(target=target, draft=draft, draft_count=2, **settings)
    async with (
        running_coordinator(asked, Instruments(new_registry("coordinator"))) as server,
        Client(server.address) as client,
    ):
        yield client
    coroutines = [str(task.get_coro()) for task in asyncio.all_tasks()]
    assert not [one for one in coroutines if "coordinator" in one and "test" not in one]


@pytest.fixture(scope="module")
def expected(models: Models) -> Outputs:
    return asyncio.run(undisturbed(models))


async def undisturbed(models: Models) -> Outputs:
    """Return the outputs of requests when nothing happens."""
    return [one.token_ids for one in await completions(models.targets[0].address, models.drafts[0].address)]


async def completions(target: str, draft: str) -> list[Completion]:
    """Return what a coordinator of these services answers to all requests at once."""
    async with coordinating(target, draft) as client:
        return await asyncio.gather(*map(client.complete, REQUESTS))


async def disturbed(client: Client, disturb: Disturb, requests: Sequence[GenerationRequest] = REQUESTS) -> Outputs:
    """Run all requests; disturb them after each output's first tokens and long before its last."""
    outputs = [[list[int]() for _ in range(request.completion_count)] for request in requests]
    begun = asyncio.Event()

    async def run(own: Outputs, request: GenerationRequest) -> None:
        async for piece in client.generate(request):
            own[piece.completion_index] += [token.token_id for token in piece.tokens]
            if all(map(all, outputs)):
                begun.set()

    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(run(own, request)) for own, request in zip(outputs, requests, strict=True)]
        await begun.wait()
        assert not any(task.done() for task in tasks)
        await disturb()
    return [one for own in outputs for one in own]


async def until_replica(client: Client, address: str, wanted: ReplicaState) -> None:
    """Wait until the replica at the address is in the wanted state."""
    while True:
        described = await client.describe()
        (replica,) = (one for one in (*described.targets, *described.drafts) if one.address == address)
        if replica.state is wanted:
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("source", [DraftSource.HEADS, DraftSource.DRAFT], ids=["target with heads", "draft"])
async def test_a_service_killed_and_started_again_costs_no_token(
    source: DraftSource, expected: Outputs, models: Models
) -> None:
    """The service that drafts loses its cache, so every sequence is sent again in full."""
    target, draft = models.targets[1], models.drafts[0]
    victim = target if source is DraftSource.HEADS else draft
    requests = [replace(one, drafting=DraftingOptions((source,))) for one in REQUESTS]
    async with coordinating(target.address, draft.address) as client:
        assert await disturbed(client, victim.restart, requests) == expected
        await until_replica(client, victim.address, ReplicaState.UP)
        (usage,) = (await client.complete(requests[0])).finish.usage.sources
        assert usage.source is source
        assert usage.drafted_count > 0
        await until_freed(target, draft)


async def test_of_two_targets_one_may_be_killed_and_one_paused(
    expected: Outputs,
    models: Models,
) -> None:
    (one, other), (draft, second) = models.targets, models.drafts
    async with coordinating(f"{one.address},{other.address}", f"{draft.address},{second.address}") as client:

        async def kill() -> None:
            one.kill()

        assert await disturbed(client, kill) == expected
        await until_replica(client, one.address, ReplicaState.DOWN)
        await one.start_again()
        await until_replica(client, one.address, ReplicaState.UP)

        async def pause() -> None:
            other.pause()

        assert await disturbed(client, pause) == expected
        await until_replica(client, other.address, ReplicaState.DOWN)
        other.resume()
        # A resumed service frees what it held when it was paused, because it can be told now.
        await until_freed(one, other, draft, second)


async def test_a_paused_draft_is_done_without_and_taken_back(
    expected: Outputs,
    models: Models,
) -> None:
    target, draft = models.targets[0], models.drafts[0]
    async with coordinating(target.address, draft.address) as client:

        async def pause() -> None:
            draft.pause()

        assert await disturbed(client, pause) == expected
        assert (await client.describe()).drafts[0].circuit is CircuitState.OPEN
        draft.resume()
        await until_replica(client, draft.address, ReplicaState.UP)
        while not (await client.complete(REQUESTS[0])).finish.usage.drafted_count:
            pass
        await until_freed(target, draft)


@pytest.mark.parametrize("role", ["target", pytest.param("draft", marks=pytest.mark.long)])
async def test_connections_cut_stalled_and_late_cost_no_token(role: str, expected: Outputs, models: Models) -> None:
    target, draft = models.targets[0], models.drafts[0]
    async with running_proxy((target if role == "target" else draft).address) as proxy:
        addresses = {"target": target.address, "draft": draft.address, role: proxy.address}
        async with coordinating(**addresses) as client:

            async def cut() -> None:
                for _ in range(3):
                    seen = proxy.connection_count
                    proxy.cut()
                    while proxy.connection_count == seen:
                        await asyncio.sleep(0.01)

            async def delay() -> None:
                proxy.stall()
                await asyncio.sleep(0.3)
                proxy.flow()

            async def stall() -> None:
                proxy.stall()
                await until_replica(client, proxy.address, ReplicaState.DOWN)
                proxy.flow()

            for disturb in (cut, delay, stall):
                assert await disturbed(client, disturb) == expected, disturb.__name__
            await until_replica(client, proxy.address, ReplicaState.UP)
            await until_freed(target, draft)


async def test_a_draft_that_joins_late_is_used(expected: Outputs, models: Models) -> None:
    target, draft = models.targets[0], models.drafts[0]
    draft.kill()
    async with coordinating(target.address, draft.address) as client:
        assert (await client.describe()).draft is None
        assert await disturbed(client, draft.start_again) == expected
        await until_replica(client, draft.address, ReplicaState.UP)
        assert (await client.complete(REQUESTS[0])).finish.usage.drafted_count > 0
        await until_freed(target, draft)


async def test_a_full_disk_under_the_log_and_the_spans_loses_those_and_nothing_else(
    expected: Outputs, models: Models
) -> None:
    target, draft = models.targets[0], models.drafts[0]
    flags = ["coordinator", "--target", target.address, "--draft", draft.address, "--trace-file", "/dev/full"]
    with running_services(flags, log_path="/dev/full") as (coordinator,):
        async with Client(coordinator.address, NO_RETRIES) as client:
            assert [one.token_ids for one in await asyncio.gather(*map(client.complete, REQUESTS))] == expected
    await until_freed(target, draft)


@pytest.mark.review
async def test_a_coordinator_killed_and_started_again_and_one_that_is_told_to_stop_cost_no_token(
    expected: Outputs, models: Models
) -> None:
    target, draft = models.targets[0], models.drafts[0]
    flags = ["coordinator", "--target", target.address, "--draft", draft.address, "--draft-count", "2"]
    # A request needs more time than this: running requests are cut off and continue at the other coordinator.
    hasty = [*flags, "--shutdown-grace-s", "0.01"]
    with running_services(hasty, hasty) as (one, other):
        async with Client(one.address, PATIENT) as client, Client(f"{one.address},{other.address}", PATIENT) as both:
            assert await disturbed(client, one.restart) == expected
            # review C13
            whole = [completion.token_ids for completion in await both.complete_all(SEVERAL)]
            assert await disturbed(client, one.restart, [SEVERAL]) == whole

            async def stop_one() -> None:
                assert await one.terminate() == 0

            assert await disturbed(both, stop_one) == expected
        assert await other.terminate() == 0
    # The killed coordinator released nothing: the services drop sequences that nobody names.
    await until_freed(target, draft)
