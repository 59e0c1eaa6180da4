"""The coordinator over fake services: its real loop, alone or behind real gRPC."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from coordinator.background import background
from coordinator.config import CoordinatorSettings
from coordinator.door.admission import Admission
from coordinator.door.admission_threads import AdmissionThreads, admission_threads
from coordinator.door.served import Served
from coordinator.placement.target import Serving
from coordinator.protocols import Drafter, Drafters
from coordinator.replicas.replica import Replica
from coordinator.requests.generation import Generation, Request
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.residency import Residency
from coordinator.rounds.scheduler import Scheduler
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.tracer import RoundTracer
from coordinator.rounds.wishes import Wish
from coordinator.security import clients_options
from coordinator.serving import open_door
from coordinator.wiring import SYSTEM_CLOCKS, Clocks, Parts, ServingMaker, wired
from paceline.client import NO_RETRIES, Client
from paceline.process.instruments import Instruments
from paceline.types import GenerationRequest, ModelDescription, OutputPiece, TokenIds
from paceline.wire import RunningServer
from tests.fakes.model_services import VOCABULARY_SIZE, FakeDrafter, FakeVerifier, describe

SERVED = Served(describe("target"), None)


def settings_of(**asked: Any) -> CoordinatorSettings:
    """Settings of a coordinator over fakes, small where nothing else is asked for."""
    small: dict[str, Any] = {
        "draft": "unused:1",
        "target": "unused:1",
        "port": 0,
        "batch_size": 4,
        "draft_count": 3,
        "lanes": 1,
        "window": 10,
        "queue_limit": 100,
        "max_new_tokens": 40,
        "shutdown_grace_s": 1,
    }
    return CoordinatorSettings(**small | asked)


MODEL = "draft"


class OneModel:
    """The drafter of one model, as all there is."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def usable(self) -> Mapping[str, Drafter]:
        return {MODEL: self._drafter}

    def owe(self, sequence_ids: list[str]) -> None:
        self._drafter.owe(sequence_ids)

    async def release(self) -> int:
        return await self._drafter.release()


def asking(generations: Sequence[Generation], draft_counts: Sequence[int]) -> dict[Generation, Wish]:
    """Wish for so many tokens of the one model's drafter."""
    return {one: Wish(count, MODEL) for one, count in zip(generations, draft_counts, strict=True)}


class NoOthers:
    """There is no other target."""

    def can_take(self, generation: Generation) -> bool:
        return False

    def take(self, generation: Generation) -> None:
        raise AssertionError("nobody can take it")


def make_serving(
    drafter: Drafter,
    verifier: FakeVerifier,
    *,
    residency: Residency | None = None,
    clocks: Clocks = SYSTEM_CLOCKS,
    registry: CollectorRegistry | None = None,
    **asked: Any,
) -> Serving:
    """Make what serves with one target; what is asked for are settings."""
    settings = settings_of(**asked)
    drafters: Drafters = OneModel(drafter)
    maker = ServingMaker(
        settings,
        drafters,
        residency or Residency(drafters),
        Statistics(),
        RoundMetrics(registry or CollectorRegistry()),
        RoundTracer(None, settings.policy),
        clocks,
    )
    return maker.make("target:0", verifier, verifier.description, NoOthers(), lambda: None)


def submit(scheduler: Scheduler, request: Request) -> Request:
    """Let a scheduler without a dispatcher have a request, after those it has."""
    request.arrival = scheduler.pool.live_count + scheduler.pool.waiting_count
    scheduler.pool.adopt(request.unfinished)
    return request


@asynccontextmanager
async def scheduling(
    drafter: Drafter, verifier: FakeVerifier, **settings: Any
) -> AsyncIterator[tuple[Admission, Scheduler]]:
    """Run the real loop of one target; settings are those of `make_serving`."""
    residency = Residency(drafter)
    scheduler = make_serving(drafter, verifier, residency=residency, **settings).scheduler
    task = asyncio.create_task(scheduler.run())
    try:
        yield admission(SERVED), scheduler
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        residency.free(scheduler.give_up())
        await residency.close()


@dataclass(frozen=True)
class Dispatched(Parts):
    """A coordinator's parts, and the fakes behind them; how they are is looked at when a test says so."""

    settings: CoordinatorSettings
    watched: Instruments
    targets: list[Replica[FakeVerifier]]
    draft_replicas: list[Replica[FakeDrafter]]

    @property
    def admission(self) -> Admission:
        return self.model.admission


async def fits(replica: Replica[Any], model: ModelDescription) -> None:
    """Every model does."""


def admission(served: Served) -> Admission:
    return Admission(served, default_max_new_tokens=40)


@asynccontextmanager
async def dispatching(
    drafters: Sequence[FakeDrafter],
    verifiers: Sequence[FakeVerifier],
    *,
    clocks: Clocks = SYSTEM_CLOCKS,
    registry: CollectorRegistry | None = None,
    tracer: Tracer | None = None,
    **asked: Any,
) -> AsyncIterator[Dispatched]:
    """Run a coordinator's parts over replicas that were looked at once; what is asked for are settings."""
    settings, watched = settings_of(**asked), Instruments(registry or CollectorRegistry(), tracer)
    async with background() as tasks:
        parts = wired(settings, tasks, watched, clocks)
        model, dispatcher, models = parts.model, parts.dispatcher, parts.drafts
        # A target was there that is gone: requests can be made before one of these is.
        gone = FakeVerifier()
        gone.description = verifiers[0].description
        await model.check_target(Replica("gone:1", gone, fits), gone.description)
        targets = [
            Replica(f"target:{n}", one, model.check_target, dispatcher.changed) for n, one in enumerate(verifiers)
        ]
        drafts = [Replica(f"draft:{n}", one, model.check_draft, models.changed) for n, one in enumerate(drafters)]
        for target in targets:
            dispatcher.changed(target)
        for draft in drafts:
            models.changed(draft)
        for replica in (*targets, *drafts):
            await replica.look()
        try:
            yield Dispatched(**vars(parts), settings=settings, watched=watched, targets=targets, draft_replicas=drafts)
        finally:
            await dispatcher.close()


@asynccontextmanager
async def fake_cluster(
    drafter: FakeDrafter, verifier: FakeVerifier, registry: CollectorRegistry, **asked: Any
) -> AsyncIterator[Client]:
    """Serve requests from fake models, one generation at a time with 4 drafts a round; yield a client."""
    async with (
        fake_server(drafter, verifier, registry, **asked) as server,
        Client(server.address, NO_RETRIES) as client,
    ):
        yield client


@asynccontextmanager
async def fake_server(
    drafter: FakeDrafter, verifier: FakeVerifier, registry: CollectorRegistry, **asked: Any
) -> AsyncIterator[RunningServer]:
    """As `fake_cluster`, for clients of any kind."""
    one_by_one: dict[str, Any] = {"batch_size": 1, "draft_count": 4}
    async with (
        dispatching([drafter], [verifier], registry=registry, **one_by_one | asked) as running,
        admission_threads() as threads,
        generation_server(running, threads) as server,
    ):
        yield server


def generation_server(running: Dispatched, threads: AdmissionThreads) -> AbstractAsyncContextManager[RunningServer]:
    return open_door(running.settings, clients_options(running.settings), running, threads, running.watched)


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(4, VOCABULARY_SIZE) for _ in range(rng.choice([1, 2, 7, 60]))) for _ in range(count)]


async def collect(request: Request) -> tuple[list[int], OutputPiece]:
    pieces = [piece async for piece in request.stream.pieces()]
    return [token.token_id for piece in pieces for token in piece.tokens], pieces[-1]


async def generate_all(
    admission: Admission, scheduler: Scheduler, all_prompts: Sequence[tuple[int, ...]], max_new_tokens: int
) -> list[list[int]]:
    requests = [admission.admit(GenerationRequest(TokenIds(one), max_new_tokens)) for one in all_prompts]
    for request in requests:
        submit(scheduler, request)
    return [output for output, _ in await asyncio.gather(*map(collect, requests))]
