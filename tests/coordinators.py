"""The coordinator over fake services: its real loop, alone or behind real gRPC."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.ahead import AheadDrafter
from coordinator.background import background
from coordinator.cluster_metrics import ClusterCollector
from coordinator.config import CoordinatorSettings
from coordinator.dispatcher import Dispatcher
from coordinator.draft_length import AutoDraftLength, FixedDraftLength
from coordinator.metrics import RoundMetrics
from coordinator.policies import make_policy
from coordinator.pool import SequencePool
from coordinator.replica import Replica
from coordinator.replicated_drafter import ReplicatedDrafter
from coordinator.requests import RequestMetrics
from coordinator.round import RoundLimits
from coordinator.round_tracer import RoundTracer
from coordinator.scheduler import ReleasingDrafter, Scheduler
from coordinator.security import clients_options
from coordinator.sequence import Sequence as Generation
from coordinator.servicer import SERVICE_NAME, GenerationServicer
from coordinator.startup import Served
from coordinator.statistics import Statistics
from paceline.client import NO_RETRIES, Client
from paceline.rpc import RunningServer, running_server
from paceline.types import GenerationRequest, ModelDescription, OutputPiece, TokenIds
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from tests.fakes import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, describe

SERVED = Served(describe("target"), None)
NOWHERE = CoordinatorSettings(draft="unused:1", target="unused:1")


def make_scheduler(
    drafter: ReleasingDrafter,
    verifier: FakeVerifier,
    *,
    batch_size: int = 4,
    draft_count: int | None = 3,
    queue_limit: int = 100,
    policy: str = "continuous",
    lanes: int = 1,
    metrics: RoundMetrics | None = None,
    statistics: Statistics | None = None,
    arrivals: Iterator[int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Scheduler:
    """Without a draft count it chooses its own."""
    chosen = make_policy(policy, window=10)
    return Scheduler(
        SequencePool(chosen.live_limit(batch_size, lanes), queue_limit, clock, arrivals),
        chosen,
        AutoDraftLength(lanes) if draft_count is None else FixedDraftLength(draft_count),
        drafter,
        verifier,
        batch_size=batch_size,
        lanes=lanes,
        limits=RoundLimits(VOCABULARY_SIZE, CHUNK_TOKENS),
        statistics=statistics or Statistics(),
        metrics=metrics or RoundMetrics(CollectorRegistry()),
        tracer=RoundTracer(None, policy),
        clock=clock,
    )


@asynccontextmanager
async def scheduling(
    drafter: FakeDrafter, verifier: FakeVerifier, **settings: Any
) -> AsyncIterator[tuple[Admission, Scheduler]]:
    """Run the real loop of one target; settings are those of `make_scheduler`."""
    scheduler = make_scheduler(drafter, verifier, **settings)
    task = asyncio.create_task(scheduler.run())
    try:
        yield Admission(SERVED, default_max_new_tokens=40), scheduler
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await scheduler.close()


@dataclass(frozen=True)
class Dispatched:
    """Targets and drafts behind a dispatcher; how they are is looked at when a test says so."""

    admission: Admission
    dispatcher: Dispatcher
    drafter: ReplicatedDrafter
    statistics: Statistics
    targets: list[Replica[FakeVerifier]]
    drafts: list[Replica[FakeDrafter]]


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
    """Run a dispatcher over replicas that were looked at once; settings are those of `make_scheduler`."""
    drafter, statistics = ReplicatedDrafter(), Statistics()
    registry = registry or CollectorRegistry()
    metrics = RoundMetrics(registry)

    def make(target: Replica[Any], arrivals: Iterator[int]) -> Scheduler:
        return make_scheduler(
            drafter,
            target.remote,
            queue_limit=queue_limit,
            metrics=metrics,
            statistics=statistics,
            arrivals=arrivals,
            clock=clock,
            **settings,
        )

    async with background() as tasks:
        dispatcher = Dispatcher(make, tasks, queue_limit=queue_limit, target_wait_s=target_wait_s, clock=clock)
        targets = [Replica(f"target:{n}", one, fits, dispatcher.changed) for n, one in enumerate(verifiers)]
        drafts = [Replica(f"draft:{n}", one, fits, drafter.changed) for n, one in enumerate(drafters)]
        for target in targets:
            dispatcher.changed(target)
        for draft in drafts:
            drafter.changed(draft)
        for replica in (*targets, *drafts):
            await replica.look()
        try:
            yield Dispatched(
                Admission(SERVED, default_max_new_tokens=40), dispatcher, drafter, statistics, targets, drafts
            )
        finally:
            await dispatcher.close()


def fits(model: ModelDescription) -> None:
    """Every model does."""


@asynccontextmanager
async def fake_cluster(
    drafter: FakeDrafter, verifier: FakeVerifier, registry: CollectorRegistry, *, queue_limit: int = 100
) -> AsyncIterator[Client]:
    """Serve requests from fake models, one sequence at a time with 4 drafts a round; yield a client."""
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
    async with dispatching(
        [drafter], [verifier], batch_size=1, draft_count=4, queue_limit=queue_limit, registry=registry
    ) as running:
        registry.register(
            ClusterCollector(running.dispatcher, running.drafter, AheadDrafter(running.drafter), running.statistics)
        )
        servicer = GenerationServicer(
            settings,
            SERVED,
            running.admission,
            running.dispatcher,
            running.drafter,
            running.statistics,
            RequestMetrics(registry),
        )
        async with running_server(
            "127.0.0.1",
            0,
            [SERVICE_NAME],
            lambda server: add_GenerationServiceServicer_to_server(servicer, server),
            grace_s=1,
            options=clients_options(settings),
        ) as server:
            yield server


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(4, VOCABULARY_SIZE) for _ in range(rng.choice([1, 2, 7, 60]))) for _ in range(count)]


async def collect(sequences: list[Generation]) -> tuple[list[int], OutputPiece]:
    pieces = [piece async for piece in sequences[0].stream.pieces()]
    return [token.token_id for piece in pieces for token in piece.tokens], pieces[-1]


async def generate_all(
    admission: Admission, scheduler: Scheduler, all_prompts: Sequence[tuple[int, ...]], max_new_tokens: int
) -> list[list[int]]:
    sequences = [admission.admit(GenerationRequest(TokenIds(one), max_new_tokens)) for one in all_prompts]
    for sequence in sequences:
        scheduler.submit(sequence)
    return [output for output, _ in await asyncio.gather(*map(collect, sequences))]
