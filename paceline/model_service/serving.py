"""The common life of the model services: load, serve until told to stop, drain."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import fields, replace
from typing import Any

import grpc
import structlog
import torch

from paceline.engine.heads.loading import LoadedHeads
from paceline.engine.loading import load_model
from paceline.engine.memory import give_back, keep_free_lists_short
from paceline.engine.model.loader import resolve_device
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.ranks.group import Group
from paceline.engine.runner import Runner
from paceline.errors import PeerUnavailable
from paceline.model_service.call_queue import TurnBound
from paceline.model_service.metrics import ModelCollector, ModelMetrics
from paceline.model_service.ranks import follow, leading, loading_together, share_loader
from paceline.model_service.servicer import Answering
from paceline.model_service.worker import ModelWorker, niceness_on
from paceline.observe.metrics import CallCounter, CertificateCollector
from paceline.observe.tracing import traced_calls, traced_requests
from paceline.process.instruments import Instruments, instruments
from paceline.process.ranks import Ranks
from paceline.process.service import announce, freeze_heap
from paceline.process.settings import ModelServiceSettings
from paceline.wire import Exchanges, RunningServer, ServerOptions, running_server, termination

log = structlog.get_logger()

EMPTY_CHECK_S = 0.05
CHUNKS_TOGETHER = 2
"""Calls are served together up to so many times the tokens of a prompts' chunk, which is what one pass may bring."""


async def serve_model(
    name: str,
    settings: ModelServiceSettings,
    options: ServerOptions,
    ranks: Ranks,
    service_name: str,
    add_servicer: Callable[[Runner, Answering, grpc.aio.Server], None],
    load: Callable[..., LoadedModel] = load_model,
    find_heads: Callable[[LoadedModel], LoadedHeads | None] = lambda model: None,
    *,
    overlaps: bool = False,
) -> None:
    """Load the model in its thread, then serve it until SIGTERM or SIGINT. `load` is a function of `engine.loading`.

    As one of several ranks load a share of it instead; ranks after the first follow that one, and serve nothing.

    `find_heads` returns the heads that draft for the model, if any. With `overlaps`, calls about different sequences
    follow each other through a model's stages.

    Raise PeerUnavailable when the device is lost meanwhile: a supervisor is to start the service anew.
    """
    role = name.removesuffix("_service")
    if settings.memory is not None:
        keep_free_lists_short()
    lanes = ranks.place.grid.stage_count if overlaps and not ranks.place.rank else 1
    engine = replace(engine_options(settings), lanes=lanes)
    if ranks.place.rank:
        return await follow(settings, engine, ranks)
    with instruments(role, settings) as watched:
        metrics = ModelMetrics(watched.registry, role)
        watched.registry.register(CertificateCollector(role, options.certificates))
        exchanges = Exchanges(traced_requests(watched.tracer))
        worker = _worker(settings, ranks, metrics, lanes)
        try:
            with loading_together(ranks):
                load = share_loader(settings, engine, ranks, load)
                runner = await _loaded_runner(settings, engine, load, find_heads, worker, metrics)
            watched.registry.register(ModelCollector(role, runner.describe))

            def add(server: grpc.aio.Server) -> None:
                add_servicer(runner, Answering(worker, exchanges, settings.max_rows, settings.weights), server)

            async with (
                leading(runner.model.group, ranks, worker, settings.rank_timeout_s),
                _server(role, settings, options, watched, exchanges, service_name, add) as server,
            ):
                await _serve_until_told(name, settings, watched, exchanges, server, runner, worker)
        finally:
            worker.close()


def _server(
    role: str,
    settings: ModelServiceSettings,
    options: ServerOptions,
    watched: Instruments,
    exchanges: Exchanges,
    service_name: str,
    add: Callable[[grpc.aio.Server], None],
) -> AbstractAsyncContextManager[RunningServer]:
    return running_server(
        settings.host,
        settings.port,
        [service_name],
        add,
        grace_s=settings.shutdown_grace_s / 2,
        options=options,
        admitted_interceptors=traced_calls(watched.tracer),
        interceptors=[CallCounter(watched.registry, role)],
        streams=exchanges,
    )


async def _serve_until_told(
    name: str,
    settings: ModelServiceSettings,
    watched: Instruments,
    exchanges: Exchanges,
    server: RunningServer,
    runner: Runner,
    worker: ModelWorker,
) -> None:
    """Answer calls until told to stop, and a while longer."""
    freeze_heap()
    give_back()
    server.set_serving(True)
    announce(name, server.address, watched.metrics_url)
    await _until_stopped(settings, runner, worker)
    # Coordinators that see this move their generations to other replicas, if there are any. They look at once when
    # their streams end.
    server.set_serving(False)
    exchanges.end_streams()
    await until_empty(runner, settings.shutdown_grace_s / 2)


async def _until_stopped(settings: ModelServiceSettings, runner: Runner, worker: ModelWorker) -> None:
    """Drop idle sequences until told to stop. Raise PeerUnavailable when the device is lost before."""
    dropping = asyncio.create_task(drop_idle_sequences(runner, worker, settings.sequence_ttl_s / 4))
    try:
        await stopped_or_lost(termination(stop_with_stdin=settings.stop_with_stdin), worker)
    finally:
        dropping.cancel()
    log.info("stopping", grace_s=settings.shutdown_grace_s)


def _worker(settings: ModelServiceSettings, ranks: Ranks, metrics: ModelMetrics, lanes: int) -> ModelWorker:
    bound = TurnBound(settings.max_rows, CHUNKS_TOGETHER * settings.prefill_chunk_tokens)
    return ModelWorker(
        ranks.threads(settings.threads),
        metrics.call_ended,
        niceness=niceness_on(resolve_device(settings.device)),
        lanes=lanes,
        bound=bound,
        on_turn=metrics.turn_begins,
    )


async def _loaded_runner(
    settings: ModelServiceSettings,
    options: EngineOptions,
    load: Callable[..., LoadedModel],
    find_heads: Callable[[LoadedModel], LoadedHeads | None],
    worker: ModelWorker,
    metrics: ModelMetrics,
) -> Runner:
    model = await worker.run(load, settings.model, settings.dtype, settings.device, settings.quantization)
    worker.watch_device(device_trial(model.description.device, model.group))
    if model.group:
        model.group.while_waiting = worker.turns.let_go
    heads = await worker.run(find_heads, model)
    runner = await worker.run(Runner, model, options, on_pass=metrics.pass_ended, heads=heads)
    await worker.run(runner.record)
    described = runner.describe()
    log.info(
        "model loaded",
        model=settings.model,
        dtype=described.dtype,
        quantization=described.quantization or None,
        device=described.device,
        weights=described.weights_digest,
        revision=described.revision or None,
        kernels=described.kernels,
        heads=described.heads or None,
    )
    return runner


async def stopped_or_lost(stopped: Coroutine[Any, Any, None], worker: ModelWorker) -> None:
    """Wait until the service is told to stop. Raise PeerUnavailable when its device is lost before."""
    told, lost = asyncio.create_task(stopped), asyncio.create_task(worker.device_lost.wait())
    try:
        await asyncio.wait((told, lost), return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            raise PeerUnavailable(
                "the device failed, or a process of a model over several, and computes nothing any more; start the "
                "service anew"
            )
        told.result()
    finally:
        told.cancel()
        lost.cancel()


def device_trial(device: str, group: Group | None = None) -> Callable[[], None]:
    """Return a function that raises torch's error when the device computes nothing any more, or a rank is lost."""
    number = torch.ones(1, device=device)  # made now: a device that is merely full is not lost

    def try_device() -> None:
        number.add_(1).item()
        if group:
            group.check()

    return try_device


def engine_options(settings: ModelServiceSettings) -> EngineOptions:
    """Return the engine's options from a service's settings. Options without a setting keep their defaults."""
    known = [field.name for field in fields(EngineOptions)]
    return EngineOptions(**{name: getattr(settings, name) for name in known if hasattr(settings, name)})


async def until_empty(runner: Runner, timeout_s: float) -> None:
    """Wait until the cache holds no sequence, but no longer than `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while runner.cache.sequence_count:  # noqa: ASYNC110  (the model's thread has no event to wait for)
                await asyncio.sleep(EMPTY_CHECK_S)


async def drop_idle_sequences(runner: Runner, worker: ModelWorker, interval_s: float) -> None:
    """Free sequences whose owner is gone, every `interval_s`, until cancelled or the device is lost."""
    with suppress(PeerUnavailable):  # the service ends
        while True:
            await asyncio.sleep(interval_s)
            if count := await worker.run(runner.drop_idle):
                log.info("dropped sequences that no call named for long", sequences=count)
