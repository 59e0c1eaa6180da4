"""Real servers over real gRPC on free ports, in this process, for most tests of the services."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

import grpc
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from draft_service.servicer import add_draft_service
from paceline.client import Client
from paceline.codec.names import DRAFT_SERVICE, TARGET_SERVICE
from paceline.engine.calls import Call
from paceline.engine.heads.loading import load_heads
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.model_service.servicer import Answering
from paceline.model_service.worker import ModelWorker
from paceline.observe.metrics import new_registry
from paceline.observe.tracing import traced_calls, traced_requests
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.instruments import Instruments
from paceline.process.launcher import Addresses
from paceline.process.variables import NO_HEADS
from paceline.security.channels import LOCAL, ChannelSecurity
from paceline.types import Dtype, PolicyName, Quantization
from paceline.wire import Exchanges, ServerOptions, open_channel, running_server
from target_service.servicer import add_target_service
from tests.waits import until

OPTIONS = EngineOptions(kv_memory="256MiB")


@dataclass(frozen=True)
class Cluster:
    client: Client
    coordinator_address: str
    draft_address: str
    target_address: str
    draft: Runner
    target: Runner
    exchanges: tuple[Exchanges, Exchanges]
    """Streams of draft and target."""
    registry: CollectorRegistry
    """The coordinator's registry."""

    @property
    def addresses(self) -> tuple[str, str, str]:
        """Return the addresses of draft, target and coordinator."""
        return self.draft_address, self.target_address, self.coordinator_address

    @property
    def held_sequence_count(self) -> int:
        return self.draft.cache.sequence_count + self.target.cache.sequence_count

    @property
    def kept_stream_count(self) -> int:
        """Return how many of the coordinator's open streams to the model services have no request in work."""
        return sum(one.waiting_count for one in self.exchanges)


@dataclass(frozen=True)
class ModelServer:
    runner: Runner
    address: str
    channel: grpc.aio.Channel
    worker: ModelWorker
    exchanges: Exchanges


@asynccontextmanager
async def model_server(
    role: str,
    model: str | Path,
    options: EngineOptions = OPTIONS,
    dtype: Dtype = "auto",
    tracer: Tracer | None = None,
    server_options: ServerOptions | None = None,
    security: ChannelSecurity = LOCAL,
    port: int = 0,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    quantization: Quantization = "none",
    heads: str | Path = NO_HEADS,
) -> AsyncIterator[ModelServer]:
    """Serve one model as `draft` or `target`; its channel is opened with `security`."""
    name, add = (DRAFT_SERVICE, add_draft_service) if role == "draft" else (TARGET_SERVICE, add_target_service)
    # One thread: the tests run on machines with few cores, where more threads only wait for each other.
    worker, exchanges = ModelWorker(1), Exchanges(traced_requests(tracer))
    loaded = await worker.run(load_model, str(model), dtype, "cpu", quantization)
    runner = Runner(loaded, options, heads=await worker.run(load_heads, str(heads), loaded))
    async with running_server(
        "127.0.0.1",
        port,
        [name],
        lambda server: add(runner, Answering(worker, exchanges), server),
        grace_s=1,
        options=server_options or ServerOptions(),
        admitted_interceptors=[*interceptors, *traced_calls(tracer)],
        streams=exchanges,
    ) as server:
        server.set_serving(True)
        async with open_channel(server.address, security=security) as channel:
            yield ModelServer(runner, server.address, channel, worker, exchanges)
    worker.close()


@asynccontextmanager
async def held_up(worker: ModelWorker) -> AsyncIterator[None]:
    """Keep a worker from other work while the block runs, and no longer: its thread would outlast a test that fails."""
    go_on = Event()
    held = asyncio.create_task(worker.run(go_on.wait))
    try:
        yield
    finally:
        go_on.set()
        await held


async def calls_of_callers(worker: ModelWorker, count: int) -> list[Call[Any]]:
    """Return the calls that wait for a worker that is held up, once they are those of so many callers."""

    def waiting() -> list[Call[Any]]:
        # Other work waits too, and second calls of one coordinator, which have a turn of their own.
        return [one.call for one in worker._queue.waiting() if one.call]

    await until(lambda: len({one.caller for one in waiting()}) >= count)
    return waiting()


@asynccontextmanager
async def cluster(
    target: str | Path,
    draft: str | Path,
    *,
    batch_size: int = 8,
    draft_count: int | Literal["auto"] = 5,
    policy: PolicyName = "continuous",
    lanes: int | None = None,
    options: EngineOptions = OPTIONS,
    dtype: Dtype = "auto",
    tracer: Tracer | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    quantization: Quantization = "none",
    heads: str | Path = NO_HEADS,
) -> AsyncIterator[Cluster]:
    """Serve; `interceptors` are those of both model services, `quantization` and `heads` are the target's."""
    serve = partial(model_server, dtype=dtype, tracer=tracer, interceptors=interceptors)
    async with (
        serve("target", target, options, quantization=quantization, heads=heads) as verifying,
        serve("draft", draft, replace(options, numerics="fast")) as drafting,
    ):
        settings = CoordinatorSettings(
            draft=drafting.address,
            target=verifying.address,
            batch_size=batch_size,
            draft_count=draft_count,
            policy=policy,
            lanes=lanes,
        )
        watched = Instruments(new_registry("coordinator"), tracer)
        async with running_coordinator(settings, watched) as server, Client(server.address) as client:
            yield Cluster(
                client,
                server.address,
                drafting.address,
                verifying.address,
                drafting.runner,
                verifying.runner,
                (drafting.exchanges, verifying.exchanges),
                watched.registry,
            )


@asynccontextmanager
async def cluster_here(options: ClusterOptions, *_: Any) -> AsyncIterator[Addresses]:
    """As `running_cluster`, but without processes, which start slowly."""

    def asked(*names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(options, name)) is not None}

    engine = EngineOptions(kv_memory="64MiB", **asked("layout", "prefix_sharing"))
    coordinator = asked("batch_size", "draft_count", "policy", "lanes", "dtype")
    async with cluster(options.target_model, options.draft_model, options=engine, **coordinator) as running:
        yield Addresses(running.coordinator_address, running.draft_address, running.target_address, ())
