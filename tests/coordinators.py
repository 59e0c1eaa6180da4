"""The coordinator over fake services: its real loop, alone or behind real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry

from coordinator.admission import Admission
from coordinator.config import CoordinatorSettings
from coordinator.draft_length import AutoDraftLength, FixedDraftLength
from coordinator.metrics import ClusterCollector, RoundMetrics
from coordinator.policies import make_policy
from coordinator.pool import SequencePool
from coordinator.requests import RequestMetrics
from coordinator.round import RoundLimits
from coordinator.round_tracer import RoundTracer
from coordinator.scheduler import Scheduler
from coordinator.servicer import SERVICE_NAME, GenerationServicer
from coordinator.startup import Pair
from paceline.client import NO_RETRIES, Client
from paceline.rpc import RunningServer, ServerOptions, running_server
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from tests.fakes import CHUNK_TOKENS, VOCABULARY_SIZE, FakeDrafter, FakeVerifier, describe

PAIR = Pair(describe("draft"), describe("target"), None)


@asynccontextmanager
async def scheduling(
    drafter: FakeDrafter,
    verifier: FakeVerifier,
    *,
    batch_size: int = 4,
    draft_count: int | None = 3,
    draft_max_length: int = 1000,
    queue_limit: int = 100,
    policy: str = "continuous",
    lanes: int = 1,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[tuple[Admission, Scheduler]]:
    """Run the real loop; without a draft count it chooses its own."""
    chosen = make_policy(policy, window=10)
    scheduler = Scheduler(
        SequencePool(chosen.live_limit(batch_size, lanes), queue_limit),
        chosen,
        AutoDraftLength(lanes) if draft_count is None else FixedDraftLength(draft_count),
        drafter,
        verifier,
        batch_size=batch_size,
        lanes=lanes,
        limits=RoundLimits(draft_max_length, VOCABULARY_SIZE, CHUNK_TOKENS),
        metrics=RoundMetrics(registry or CollectorRegistry()),
        tracer=RoundTracer(None, policy),
    )
    task = asyncio.create_task(scheduler.run())
    try:
        yield Admission(PAIR, default_max_new_tokens=40), scheduler
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await scheduler.drain()


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
    options: ServerOptions | None = None,
) -> AsyncIterator[RunningServer]:
    """As `fake_cluster`, for clients of any kind."""
    async with scheduling(
        drafter, verifier, batch_size=1, draft_count=4, queue_limit=queue_limit, registry=registry
    ) as (admission, scheduler):
        registry.register(ClusterCollector(scheduler))
        settings = CoordinatorSettings(draft="unused:1", target="unused:1")
        servicer = GenerationServicer(settings, PAIR, admission, scheduler, RequestMetrics(registry))
        async with running_server(
            "127.0.0.1",
            0,
            [SERVICE_NAME],
            lambda server: add_GenerationServiceServicer_to_server(servicer, server),
            grace_s=1,
            options=options or ServerOptions(),
        ) as server:
            yield server
