"""Another model under a running coordinator: when it is served, and how older requests end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest

from coordinator.config import CoordinatorSettings
from coordinator.door.admission_threads import AdmissionThreads
from coordinator.requests.generation import Request
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client
from paceline.errors import InvalidRequest, ModelChanged, PeerUnavailable
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.types import GenerationRequest, ModelIdentity, ReplicaState, ResponseFormat, TokenIds, TokenizerFiles
from tests.checkpoints import write_model
from tests.clusters import model_server
from tests.coordinators import Dispatched, dispatching, generation_server
from tests.fakes.dispatches import output, submit, until, whole
from tests.fakes.model_services import FakeDrafter, FakeVerifier
from tests.fakes.tokenizers import byte_tokenizer
from tests.ports import port_for_later

pytestmark = pytest.mark.review  # C2

T = TypeVar("T")

OLD, NEW = 17, 23
"""Languages of the made-up targets."""


def target(language: int, process: str = "first", longest: int = 1000) -> FakeVerifier:
    verifier = FakeVerifier(language=language)
    become(verifier, language, process, longest)
    return verifier


def become(verifier: FakeVerifier, language: int, process: str, longest: int = 1000) -> None:
    """Answer as another process at the same address, with nothing cached."""
    verifier.evict()
    verifier.away, verifier.language = None, language
    digest, cache = f"model {language}", replace(verifier.description.cache, max_length=longest)
    verifier.description = replace(
        verifier.description, weights_digest=digest, cache=cache, identity=ModelIdentity(digest, process)
    )


async def lose(running: Dispatched, number: int) -> None:
    """Make a call and the next check find a target gone."""
    replica, gone = running.targets[number], PeerUnavailable("gone")
    replica.remote.away = gone
    replica.lose(gone)
    await replica.look()


@dataclass
class Reader:
    """A client's tokens when its request ends, however it ends."""

    request: Request
    token_ids: list[int] = field(default_factory=list)

    async def read(self) -> None:
        async for piece in self.request.stream.pieces():
            self.token_ids += [token.token_id for token in piece.tokens]


async def test_the_new_model_is_taken_over_when_the_last_target_of_the_old_one_is_gone_and_no_output_mixes() -> None:
    first, second = target(OLD), target(OLD)
    async with dispatching([FakeDrafter(0.5)], [first, second], batch_size=2) as running:
        readers = [Reader(submit(running, (n, n), 400)) for n in range(4, 12)]
        reading = [asyncio.create_task(one.read()) for one in readers]
        await lose(running, 0)
        become(first, NEW, "new")
        await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.REFUSED
        await until(lambda: any(len(one.token_ids) > 20 for one in readers))
        await lose(running, 1)
        assert not first.token_ids
        await running.targets[0].look()
        assert running.targets[0].is_up
        assert running.model.target.identity.model_digest == "model 23"
        assert await output(submit(running, (5, 5))) == whole((5, 5), language=NEW)
        for end in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(end, ModelChanged)
            assert "digest 'model 17' was served, and target with digest 'model 23' has taken" in str(end)
        for n, reader in enumerate(readers, start=4):
            assert reader.token_ids == whole((n, n), 400)[: len(reader.token_ids)]
        become(second, OLD, "late")
        await running.targets[1].look()
        assert running.targets[1].state is ReplicaState.REFUSED
        await running.residency.close()
        assert running.residency.held_count == 0
        assert not first.token_ids


async def test_a_target_that_drains_or_whose_connection_broke_is_left_still() -> None:
    first, second = target(OLD), target(OLD)
    async with dispatching([], [first, second]) as running:
        await lose(running, 0)
        become(first, NEW, "new")
        request = submit(running, (5, 6))
        second.is_draining = True
        await running.targets[1].look()
        await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.REFUSED
        second.is_draining = False
        await running.targets[1].look()
        running.targets[1].lose(PeerUnavailable("the connection broke"))
        await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.REFUSED
        await running.targets[1].look()
        assert await output(request) == whole((5, 6))


async def test_a_target_that_no_name_leads_to_is_left_only_while_it_has_generations() -> None:
    """A pod taken out of its service, to be looked at, had all targets of a new model refused while it lived."""
    taken_out, new = target(OLD), target(OLD)
    async with dispatching([], [taken_out, new]) as running:
        await lose(running, 1)
        become(new, NEW, "new")
        request = submit(running, (5, 6), 400)
        running.targets[0].set_named(False)
        await running.targets[0].look()
        await running.targets[1].look()
        states = [one.state for one in running.targets]
        assert states == [ReplicaState.DRAINING, ReplicaState.REFUSED]
        assert await output(request) == whole((5, 6), 400)
        await running.targets[0].look()
        await running.targets[1].look()
        assert running.targets[1].is_up
        assert await output(submit(running, (5, 7))) == whole((5, 7), language=NEW)
        await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.REFUSED


async def test_a_single_target_that_restarts_as_the_same_model_goes_on_and_as_another_ends_what_waits() -> None:
    only = target(OLD)
    async with dispatching([], [only]) as running:
        request = submit(running, (5, 6))
        await lose(running, 0)
        become(only, OLD, "second")
        await running.targets[0].look()
        assert await output(request) == whole((5, 6))
        await lose(running, 0)
        waiting = submit(running, (5, 7))
        become(only, NEW, "third")
        await running.targets[0].look()
        with pytest.raises(ModelChanged):
            await output(waiting)
        assert await output(submit(running, (5, 7))) == whole((5, 7), language=NEW)


async def test_a_target_replaced_between_two_looks_is_judged_anew_and_its_rounds_begin_anew() -> None:
    only = target(OLD)
    async with dispatching([], [only]) as running:
        become(only, NEW, "second")
        running.targets[0].lose(PeerUnavailable("asks what it is"))
        await running.targets[0].look()
        assert running.targets[0].is_up
        assert await output(submit(running, (5, 6))) == whole((5, 6), language=NEW)


async def test_a_tokenizer_of_another_process_than_was_described_is_not_taken() -> None:
    only = target(OLD)
    async with dispatching([], [only]) as running:

        async def download_tokenizer() -> TokenizerFiles | None:
            become(only, 29, "another")
            return None

        await lose(running, 0)
        become(only, NEW, "second")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(only, "download_tokenizer", download_tokenizer)
            await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.DOWN
        assert "was replaced while its tokenizer was read" in str(running.targets[0].error)
        assert running.model.target.identity.model_digest == "model 17"
        await running.targets[0].look()
        assert await output(submit(running, (5, 6))) == whole((5, 6), language=29)


async def test_of_two_new_models_that_answer_at_once_one_is_served_and_the_other_refused() -> None:
    first, second = target(OLD), target(OLD)
    async with dispatching([], [first, second]) as running:
        await lose(running, 0)
        await lose(running, 1)
        become(first, NEW, "new")
        become(second, 29, "other")
        await asyncio.gather(*(one.look() for one in running.targets))
        assert sorted(one.state.value for one in running.targets) == ["refused", "up"]


async def test_a_tokenizer_that_cannot_be_read_refuses_its_target_and_nothing_else() -> None:
    only = target(OLD)
    async with dispatching([], [only]) as running:
        await lose(running, 0)
        become(only, NEW, "second")
        only.tokenizer = TokenizerFiles("{half")
        await running.targets[0].look()
        assert running.targets[0].state is ReplicaState.REFUSED
        assert "the tokenizer cannot be read" in str(running.targets[0].error)


async def test_the_vocabulary_of_formats_is_read_with_a_model_and_kept_when_its_limits_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = target(OLD)
    async with dispatching([], [only]) as running:
        await lose(running, 0)
        become(only, NEW, "second")
        only.tokenizer = TokenizerFiles(byte_tokenizer().to_str())
        await running.targets[0].look()
        monkeypatch.setattr("paceline.grammars.LLTokenizer", lambda *_, **__: pytest.fail("the vocabulary is read"))
        await lose(running, 0)
        become(only, NEW, "third", longest=500)
        await running.targets[0].look()
        assert running.model.target.longest_sequence == 500
        grammars = running.model.admission.served.grammars
        assert grammars
        grammars.check(ResponseFormat(regex="(ab)+"))


async def test_drafts_are_judged_by_the_target_that_is_served_now() -> None:
    only, draft = target(OLD), FakeDrafter(0.5)
    async with dispatching([draft], [only]) as running:
        await lose(running, 0)
        become(only, NEW, "second")
        only.description = replace(only.description, vocabulary_size=49)
        await running.targets[0].look()
        assert not running.drafts.is_healthy
        await running.draft_replicas[0].look()
        assert running.draft_replicas[0].state is ReplicaState.REFUSED
        draft.description = only.description
        await running.draft_replicas[0].look()
        assert running.drafts.is_healthy


async def test_a_draft_that_fits_the_new_model_no_more_frees_what_it_cached_for_the_old_one() -> None:
    """It kept that until it had heard nothing of it for long: a draft may serve other coordinators meanwhile."""
    only, draft = target(OLD), FakeDrafter(0.5)
    async with dispatching([draft], [only]) as running:
        reader = Reader(submit(running, (5, 6), 400))
        reading = asyncio.create_task(reader.read())
        await until(lambda: bool(draft.token_ids))
        await lose(running, 0)
        become(only, NEW, "second")
        only.description = replace(only.description, vocabulary_size=49)
        await running.targets[0].look()
        with pytest.raises(ModelChanged):
            await reading
        await running.residency.close()
        await running.draft_replicas[0].look()
        assert running.draft_replicas[0].state is ReplicaState.REFUSED
        assert not draft.token_ids


async def test_the_same_model_with_a_smaller_cache_is_served_and_ends_only_what_does_not_fit() -> None:
    """The target was refused permanently."""
    only = target(OLD)
    async with dispatching([], [only]) as running:
        await lose(running, 0)
        fits, outgrows = submit(running, (5, 6), 30), submit(running, (5, 7), 60)
        become(only, OLD, "second", longest=40)
        await running.targets[0].look()
        with pytest.raises(PeerUnavailable, match=r"come to 62 tokens, .* takes 40 at most; ask for fewer"):
            await output(outgrows)
        assert await output(fits) == whole((5, 6))
        with pytest.raises(InvalidRequest, match="room for 1 to 38"):
            submit(running, (5, 7), 60)
        await lose(running, 0)
        become(only, OLD, "third")
        await running.targets[0].look()
        assert await output(submit(running, (5, 7), 60)) == whole((5, 7), 60)


async def test_a_smaller_cache_is_refused_while_a_larger_one_is_there() -> None:
    async with dispatching([], [target(OLD), target(OLD, "other", longest=999)]) as running:
        assert running.targets[1].state is ReplicaState.REFUSED
        assert "takes sequences of 999 tokens, and what is served 1000" in str(running.targets[1].error)
        await lose(running, 0)
        await running.targets[1].look()
        assert await output(submit(running, (5, 6))) == whole((5, 6))


class Threads(AdmissionThreads):
    """Runs something once while a request is read."""

    def __init__(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(1)
        self._meanwhile: Callable[[], Awaitable[None]] | None = meanwhile

    async def run(self, admit: Callable[[], T], byte_count: int) -> T:
        read = await super().run(admit, byte_count)
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile:
            await meanwhile()
        return read


async def test_a_request_that_was_read_for_the_old_model_is_read_again_for_the_new_one() -> None:
    only = target(OLD)

    async def change() -> None:
        await lose(running, 0)
        become(only, NEW, "second")
        await running.targets[0].look()

    async with (
        dispatching([], [only]) as running,
        generation_server(running, Threads(change)) as server,
        Client(server.address, NO_RETRIES) as client,
    ):
        asked = GenerationRequest(TokenIds((5, 6)), 30, ignore_end_tokens=True)
        assert (await client.complete(asked)).token_ids == whole((5, 6), language=NEW)


PROMPTS = [(20 + n, 21, 22) for n in range(4)]


@dataclass
class Address:
    """An address where targets are served in turn."""

    port: int = field(default_factory=port_for_later)

    @asynccontextmanager
    async def serving(self, model: Path) -> AsyncIterator[str]:
        async with model_server("target", model, port=self.port) as server:
            yield server.address


@dataclass
class Load:
    """Clients that repeat requests, each call once, and their outputs."""

    address: str
    outputs: list[tuple[int, list[int]]] = field(default_factory=list)
    """Complete outputs: number of the prompt, tokens."""
    cut_off: list[tuple[int, list[int]]] = field(default_factory=list)
    """Outputs that ended with ModelChanged."""

    async def run(self, number: int) -> None:
        async with Client(self.address, NO_RETRIES) as client:
            while True:
                token_ids: list[int] = []
                try:
                    async for piece in client.generate(request(number)):
                        token_ids += [token.token_id for token in piece.tokens]
                except ModelChanged:
                    self.cut_off.append((number, token_ids))
                else:
                    self.outputs.append((number, token_ids))


def request(number: int) -> GenerationRequest:
    return GenerationRequest(TokenIds(PROMPTS[number]), 60, ignore_end_tokens=True)


async def outputs_of(client: Client) -> list[list[int]]:
    return [one.token_ids for one in await asyncio.gather(*(client.complete(request(n)) for n in range(len(PROMPTS))))]


async def states(client: Client) -> list[str]:
    return sorted(one.state.value for one in (await client.describe()).targets)


async def until_states(client: Client, *wanted: str) -> None:
    while await states(client) != sorted(wanted):
        await asyncio.sleep(0.01)


async def test_two_targets_rolled_one_after_the_other_under_load_mix_no_outputs(tmp_path: Path) -> None:
    old, new = (write_model(tmp_path / str(seed), "Llama", seed=seed) for seed in (5, 6))
    places = [Address(), Address()]
    async with AsyncExitStack() as running:
        first, second = AsyncExitStack(), AsyncExitStack()
        targets = [
            await first.enter_async_context(places[0].serving(old)),
            await second.enter_async_context(places[1].serving(old)),
        ]
        settings = CoordinatorSettings(target=",".join(targets), draft="127.0.0.1:1", batch_size=2)
        coordinator = running_coordinator(settings, Instruments(new_registry("coordinator")))
        server = await running.enter_async_context(coordinator)
        client = await running.enter_async_context(Client(server.address))
        await until_states(client, "up", "up")
        expected = {"old": await outputs_of(client)}
        load = Load(server.address)
        asking = [asyncio.create_task(load.run(number)) for number in range(len(PROMPTS))]

        await first.aclose()
        await running.enter_async_context(places[0].serving(new))
        await until_states(client, "refused", "up")
        assert not load.cut_off
        await second.aclose()
        # The first new target serves, and the second is not up yet.
        expected["new"] = await outputs_of(client)
        assert await states(client) == ["down", "up"]
        await running.enter_async_context(places[1].serving(new))
        await until_states(client, "up", "up")
        assert not any(one.done() for one in asking)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    assert all(one != another for one, another in zip(expected["old"], expected["new"], strict=True))
    assert load.cut_off
    for number, token_ids in load.cut_off:
        assert token_ids == expected["old"][number][: len(token_ids)]
    for number, token_ids in load.outputs:
        assert token_ids in (expected["old"][number], expected["new"][number])
