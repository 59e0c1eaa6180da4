"""A process other than the one that was checked: its answers are never used, not even for one round."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.replicas import replica
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.serving import running_coordinator
from paceline.client import Client
from paceline.errors import PacelineError, PeerUnavailable
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import (
    GenerationRequest,
    ModelIdentity,
    ProposeRow,
    ReplicaState,
    TokenIds,
    Verdict,
    VerifyOutcome,
    VerifyRow,
)
from paceline.wire import open_channel
from tests.checkpoints import write_model
from tests.clusters import model_server
from tests.coordinators import dispatching
from tests.fakes.dispatches import output, submit, whole
from tests.fakes.model_services import FakeVerifier
from tests.ports import port_for_later

pytestmark = pytest.mark.review  # C1

REQUEST = GenerationRequest(TokenIds((20, 21, 22)), 12, ignore_end_tokens=True)
STRANGER = ModelIdentity("another model", "another process")


class SwappedVerifier(FakeVerifier):
    """Becomes another process at a certain call, of the same model or another, which then chooses one token only."""

    def __init__(self, after: int, *, other_model: bool) -> None:
        super().__init__(self._swap)
        self.description = replace(self.description, weights_digest="one", identity=ModelIdentity("one", "first"))
        self._after = after
        self._other_model = other_model

    def _swap(self, number: int) -> None:
        if number == self._after:
            self.evict()
            name = "two" if self._other_model else "one"
            self.description = replace(self.description, weights_digest=name, identity=ModelIdentity(name, "second"))

    def _verify(self, row: VerifyRow) -> VerifyOutcome | PacelineError:
        outcome = super()._verify(row)
        if self.description.weights_digest == "two" and isinstance(outcome, Verdict):
            outcome = replace(outcome, next_token_id=0)
        return outcome


@pytest.mark.parametrize("other_model", [True, False])
@pytest.mark.parametrize("after", [1, 2, 5])
async def test_outputs_are_the_first_models_when_a_target_is_swapped_between_looks(
    after: int, other_model: bool
) -> None:
    swapped, survivor = SwappedVerifier(after, other_model=other_model), SwappedVerifier(-1, other_model=False)
    async with dispatching([], [swapped, survivor], batch_size=2) as running:
        requests = [submit(running, (n, n)) for n in range(4, 10)]
        assert await asyncio.gather(*map(output, requests)) == [whole((n, n)) for n in range(4, 10)]
        assert running.dispatcher.moved_count > 0
        await running.targets[0].look()
        assert running.targets[0].state is (ReplicaState.REFUSED if other_model else ReplicaState.UP)


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_an_answer_of_another_process_counts_as_no_answer(role: str, tmp_path: Path) -> None:
    async with model_server(role, write_model(tmp_path, "Llama")) as server:
        kind = RemoteVerifier if role == "target" else RemoteDrafter
        remote = kind(open_channel(server.address), 30.0)

        async def ask() -> None:
            if isinstance(remote, RemoteVerifier):
                await remote.verify([VerifyRow("a", 0, (8,), ())])
            else:
                await remote.propose([ProposeRow("a", 0, (8,), 1)])

        await ask()  # no identity is trusted yet
        remote.trust(STRANGER)
        words = r"is gone \(model another mode, process another proc\), and another answers \(model [0-9a-f]{12}, "
        with pytest.raises(PeerUnavailable, match=words):
            await ask()
        remote.trust((await remote.describe(30.0)).identity)
        await ask()
        await remote.close()


class Place:
    """An address where targets are served in turn under one name."""

    def __init__(self, folder: Path) -> None:
        self.models = [write_model(folder / str(seed), "Llama", seed=seed) for seed in (5, 6)]
        self._name = folder / "served"
        self._port = port_for_later()

    @asynccontextmanager
    async def serving(self, model: int) -> AsyncIterator[str]:
        self._name.unlink(missing_ok=True)
        os.symlink(self.models[model], self._name)
        async with model_server("target", self._name, port=self._port) as server:
            yield server.address


async def test_a_coordinator_whose_only_target_is_swapped_serves_each_model_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review C1, C2: with equal names it served the other model as the first; then it waited 900 s.

    A request without tokens begins anew by itself.
    """
    place = Place(tmp_path)
    for interval in ("CHECK_INTERVAL_S", "UP_CHECK_INTERVAL_S"):
        monkeypatch.setattr(replica, interval, 3600.0)  # checks run only when something happens
    async with AsyncExitStack() as running:
        async with place.serving(0) as address:
            settings = CoordinatorSettings(target=address, draft="127.0.0.1:1")
            coordinator = running_coordinator(settings, Instruments(new_registry("coordinator")))
            server = await running.enter_async_context(coordinator)
            client = await running.enter_async_context(Client(server.address))
            expected = (await client.complete(REQUEST)).token_ids
            digest = (await client.describe()).target.identity.model_digest
        monkeypatch.setattr(replica, "CHECK_INTERVAL_S", 0.05)
        async with place.serving(1):
            other = (await client.complete(REQUEST)).token_ids
            assert (await client.describe()).target.identity.model_digest != digest
            assert other == (await client.complete(REQUEST)).token_ids != expected
        async with place.serving(0):
            assert (await client.complete(REQUEST)).token_ids == expected
            assert (await client.describe()).target.identity.model_digest == digest
