"""The coordinator over fake services: its real loop, alone or behind real gRPC."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.background import background
from coordinator.cluster_metrics import ClusterCollector
from coordinator.config import CoordinatorSettings
from coordinator.door.admission import Admission
from coordinator.door.admission_threads import AdmissionThreads, admission_threads
from coordinator.door.current_model import CurrentModel
from coordinator.door.record import RequestMetrics
from coordinator.door.served import Served
from coordinator.door.servicer import SERVICE_NAME, GenerationServicer, add_generation_service
from coordinator.drafting.ahead import AheadDrafter
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.placement.dispatcher import Dispatcher
from coordinator.placement.guarded_target import FAILURES_TO_OPEN, GuardedTarget, UsualTime
from coordinator.placement.target import Serving
from coordinator.protocols import Drafter
from coordinator.replicas.circuit import Circuit
from coordinator.replicas.replica import Replica
from coordinator.requests.generation import Generation, Request
from coordinator.rounds.draft_length import AutoDraftLength, FixedDraftLength
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.policies import make_policy
from coordinator.rounds.pool import GenerationPool
from coordinator.rounds.residency import Residency
from coordinator.rounds.round import RoundLimits
from coordinator.rounds.scheduler import Others, Scheduler
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.tracer import RoundTracer
from coordinator.security import clients_options
from coordinator.serving import facts_of
from paceline.client import NO_RETRIES, Client
from paceline.types import GenerationRequest, ModelDescription, OutputPiece, PolicyName, TokenIds
from paceline.wire import RunningServer, running_server
from tests.fakes.model_services import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, describe

SERVED = Served(describe("target"), None)
NOWHERE = CoordinatorSettings(draft="unused:1", target="unused:1")


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
    address: str = "target:0",
    batch_size: int = 4,
    draft_count: int | None = 3,
    policy: PolicyName = "continuous",
    lanes: int = 1,
    metrics: RoundMetrics | None = None,
    statistics: Statistics | None = None,
    residency: Residency | None = None,
    others: Others | None = None,
    on_room: Callable[[], None] = lambda: None,
    usual: UsualTime | None = None,
    clock: Callable[[], float] = time.perf_counter,
    circuit_clock: Callable[[], float] = time.monotonic,
) -> Serving:
    """Without a draft count it chooses its own."""
    chosen = make_policy(policy, window=10)
    circuit = Circuit(circuit_clock, failures_to_open=FAILURES_TO_OPEN)
    guard = GuardedTarget(verifier, VOCABULARY_SIZE, usual, circuit, clock)
    scheduler = Scheduler(
        address,
        GenerationPool(chosen.live_limit(batch_size, lanes), clock, on_room),
        chosen,
        AutoDraftLength(lanes) if draft_count is None else FixedDraftLength(draft_count),
        drafter,
        guard,
        residency or Residency(drafter),
        others or NoOthers(),
        batch_size=batch_size,
        lanes=lanes,
        limits=RoundLimits(VOCABULARY_SIZE, CHUNK_TOKENS, token_bytes=1, page_tokens=1),
        statistics=statistics or Statistics(),
        metrics=metrics or RoundMetrics(CollectorRegistry()),
        tracer=RoundTracer(None, policy),
        clock=clock,
    )
    return Serving(guard, scheduler)


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
class Dispatched:
    """Targets and drafts behind a dispatcher; how they are is looked at when a test says so."""

    model: CurrentModel
    dispatcher: Dispatcher
    drafter: ReplicatedDrafter
    statistics: Statistics
    residency: Residency
    targets: list[Replica[FakeVerifier]]
    drafts: list[Replica[FakeDrafter]]

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
    queue_limit: int = 100,
    target_wait_s: float = 60,
    clock: Callable[[], float] = time.perf_counter,
    registry: CollectorRegistry | None = None,
    **settings: Any,
) -> AsyncIterator[Dispatched]:
    """Run a dispatcher over replicas that were looked at once; settings are those of `make_serving`."""
    drafter, statistics = ReplicatedDrafter(), Statistics()
    residency, usual = Residency(drafter), UsualTime()
    registry = registry or CollectorRegistry()
    metrics = RoundMetrics(registry)

    def make(target: Replica[Any], dispatcher: Dispatcher) -> Serving:
        return make_serving(
            drafter,
            target.remote,
            address=target.address,
            metrics=metrics,
            statistics=statistics,
            residency=residency,
            others=dispatcher,
            on_room=dispatcher.distribute,
            usual=usual,
            clock=clock,
            **settings,
        )

    async with background() as tasks:
        dispatcher = Dispatcher(
            make, residency, tasks, queue_limit=queue_limit, target_wait_s=target_wait_s, clock=clock
        )
        model = CurrentModel(admission, dispatcher, drafter)
        # A target was there that is gone: requests can be made before one of these is.
        gone = FakeVerifier()
        gone.description = verifiers[0].description
        await model.check_target(Replica("gone:1", gone, fits), gone.description)
        targets = [
            Replica(f"target:{n}", one, model.check_target, dispatcher.changed) for n, one in enumerate(verifiers)
        ]
        drafts = [Replica(f"draft:{n}", one, model.check_draft, drafter.changed) for n, one in enumerate(drafters)]
        for target in targets:
            dispatcher.changed(target)
        for draft in drafts:
            drafter.changed(draft)
        for replica in (*targets, *drafts):
            await replica.look()
        try:
            yield Dispatched(model, dispatcher, drafter, statistics, residency, targets, drafts)
        finally:
            await dispatcher.close()


@asynccontextmanager
async def fake_cluster(
    drafter: FakeDrafter, verifier: FakeVerifier, registry: CollectorRegistry, *, queue_limit: int = 100
) -> AsyncIterator[Client]:
    """Serve requests from fake models, one generation at a time with 4 drafts a round; yield a client."""
    async with (
        fake_server(drafter, verifier, registry, queue_limit=queue_limit) as server,
        Client(server.address, NO_RETRIES) as client,
    ):
        yield client


@asynccontextmanager
async def fake_server(
    drafter: FakeDrafter,
    verifier: FakeVerifier,
    registry: CollectorRegistry,
    *,
    queue_limit: int = 100,
    settings: CoordinatorSettings = NOWHERE,
) -> AsyncIterator[RunningServer]:
    """As `fake_cluster`, for clients of any kind."""
    async with (
        dispatching(
            [drafter], [verifier], batch_size=1, draft_count=4, queue_limit=queue_limit, registry=registry
        ) as running,
        admission_threads() as threads,
    ):
        registry.register(
            ClusterCollector(running.dispatcher, running.drafter, AheadDrafter(running.drafter), running.statistics)
        )
        async with generation_server(running, threads, registry, settings) as server:
            yield server


@asynccontextmanager
async def generation_server(
    running: Dispatched,
    threads: AdmissionThreads,
    registry: CollectorRegistry,
    settings: CoordinatorSettings = NOWHERE,
) -> AsyncIterator[RunningServer]:
    servicer = GenerationServicer(
        facts_of(settings),
        running.model,
        threads,
        running.dispatcher,
        running.drafter,
        running.statistics,
        RequestMetrics(registry),
    )
    async with running_server(
        "127.0.0.1",
        0,
        [SERVICE_NAME],
        lambda server: add_generation_service(servicer, server),
        grace_s=1,
        options=clients_options(settings),
    ) as server:
        yield server


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
