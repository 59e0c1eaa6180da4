"""Services told to stop: running calls end, new ones go elsewhere, and a whole cluster can be restarted."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from paceline.client import NO_RETRIES, Client
from paceline.errors import PeerUnavailable
from paceline.types import GenerationRequest, ReplicaState, SamplingParameters, TokenIds
from tests.services import PATIENT, Models, Service, running_services, until_freed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

REQUESTS = [
    GenerationRequest(TokenIds((30 + n, 21)), 120, ignore_end_tokens=True, seed=n, sampling=sampling)
    for n, sampling in enumerate([SamplingParameters(), SamplingParameters(temperature=0.8)])
]


class Load:
    """Clients that repeat requests and compare the outputs."""

    def __init__(self, client: Client, expected: list[list[int]]) -> None:
        self.request_count = 0
        self._client = client
        self._expected = expected
        self._is_over = False

    async def during(self, work: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as clients:
            for index in range(len(REQUESTS)):
                clients.create_task(self._ask(index))
            await work()
            self._is_over = True

    async def _ask(self, index: int) -> None:
        while not self._is_over:
            assert (await self._client.complete(REQUESTS[index])).token_ids == self._expected[index]
            self.request_count += 1


async def all_up(coordinator: Client) -> None:
    """Wait until a coordinator answers and uses every replica."""
    while True:
        with suppress(PeerUnavailable):
            described = await coordinator.describe()
            if {one.state for one in (*described.targets, *described.drafts)} == {ReplicaState.UP}:
                return
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one of each kind", "every service"]
)
async def test_a_rolling_restart_under_load_fails_no_request(is_whole: bool, models: Models) -> None:
    targets, drafts = (",".join(one.address for one in part) for part in (models.targets, models.drafts))
    flags = ["coordinator", "--target", targets, "--draft", drafts, "--draft-count", "2"]
    with running_services(flags, flags) as coordinators:
        addresses = [one.address for one in coordinators]
        async with Client(",".join(addresses), PATIENT) as client:
            expected = [(await client.complete(request)).token_ids for request in REQUESTS]
            load = Load(client, expected)

            async def restart_each() -> None:
                for kind in (models.targets, models.drafts, coordinators):
                    for service in kind if is_whole else kind[:1]:
                        await restart(service, addresses)

            await load.during(restart_each)
        assert load.request_count >= len(REQUESTS)
        await until_freed(*models.all)


async def restart(service: Service, coordinators: list[str]) -> None:
    assert await service.terminate() == 0
    await service.start_again()
    for address in coordinators:
        async with Client(address, PATIENT) as coordinator:
            await all_up(coordinator)


async def test_a_coordinator_that_is_told_to_stop_refuses_new_requests_and_ends_those_it_has(models: Models) -> None:
    request = GenerationRequest(TokenIds((20, 21)), 250, ignore_end_tokens=True)
    target, draft = models.targets[0], models.drafts[0]
    flags = ["coordinator", "--target", target.address, "--draft", draft.address, "--shutdown-grace-s", "100"]
    with running_services(flags, flags) as (leaving, staying):
        async with Client(leaving.address, NO_RETRIES) as old, Client(staying.address) as other:
            whole = await other.complete(request)
            stream = old.generate(request)
            tokens = [token.token_id for token in (await anext(stream)).tokens]
            stopping = asyncio.create_task(leaving.terminate())
            while await is_accepted(leaving.address):
                pass
            async with Client(f"{leaving.address},{staying.address}", PATIENT) as new:
                assert (await new.complete(request)).token_ids == whole.token_ids
            async for piece in stream:
                tokens += [token.token_id for token in piece.tokens]
            assert await stopping == 0
    await until_freed(target, draft)
    assert tokens == whole.token_ids


async def is_accepted(address: str) -> bool:
    async with Client(address, NO_RETRIES) as client:
        try:
            await client.complete(GenerationRequest(TokenIds((5,)), 1))
        except PeerUnavailable:
            return False
    return True
