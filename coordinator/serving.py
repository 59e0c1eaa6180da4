"""The coordinator's life: join the models, serve, drain. Everything is put together here."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog

from coordinator.admission import Admission
from coordinator.clients import TARGET_SERVICE, RemoteDrafter, RemoteVerifier
from coordinator.config import CoordinatorSettings
from coordinator.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from coordinator.limits import RequestLimits
from coordinator.metrics import ClusterCollector, RoundMetrics
from coordinator.policies import make_policy
from coordinator.pool import SequencePool
from coordinator.requests import RequestMetrics
from coordinator.round import RoundLimits
from coordinator.round_tracer import RoundTracer
from coordinator.scheduler import Scheduler
from coordinator.security import clients_options, models_security
from coordinator.servicer import SERVICE_NAME, GenerationServicer
from coordinator.startup import Pair, join_pair
from paceline.instruments import Instruments, instruments
from paceline.rpc import RunningServer, open_channel, running_server, termination
from paceline.service import announce
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server

log = structlog.get_logger()


async def serve(settings: CoordinatorSettings) -> None:
    with instruments("coordinator", settings) as watched:
        async with running_coordinator(settings, watched) as server:
            announce("coordinator", server.address, watched.metrics_url)
            await termination(stop_with_stdin=settings.stop_with_stdin)


@asynccontextmanager
async def running_coordinator(settings: CoordinatorSettings, watched: Instruments) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; on leaving, running requests get `shutdown_grace_s` to end."""
    options, security = clients_options(settings), models_security(settings)
    open_to = partial(
        open_channel, security=security, tracer=watched.tracer, max_message_bytes=settings.max_message_bytes
    )
    async with (
        open_to(settings.draft) as draft_channel,
        open_to(settings.target, [TARGET_SERVICE]) as target_channel,
    ):
        drafter = RemoteDrafter(draft_channel, settings.call_timeout_s)
        verifier = RemoteVerifier(target_channel, settings.call_timeout_s)
        pair = await join_pair(
            drafter,
            verifier,
            draft_address=settings.draft,
            target_address=settings.target,
            timeout_s=settings.startup_timeout_s,
        )
        scheduler = _scheduler(settings, pair, drafter, verifier, watched)
        watched.registry.register(ClusterCollector(scheduler))
        admission = Admission(
            pair,
            default_max_new_tokens=settings.max_new_tokens,
            limits=RequestLimits(settings.max_prompt_tokens, settings.max_output_tokens, settings.max_completions),
        )
        servicer = GenerationServicer(settings, pair, admission, scheduler, RequestMetrics(watched.registry))
        rounds = asyncio.create_task(scheduler.run())
        rounds.add_done_callback(_stop_if_failed)
        try:
            async with running_server(
                settings.host,
                settings.port,
                [SERVICE_NAME],
                lambda server: add_GenerationServiceServicer_to_server(servicer, server),
                grace_s=settings.shutdown_grace_s,
                options=options,
                tracer=watched.tracer,
            ) as server:
                await server.set_serving(True)
                yield server
        finally:
            rounds.cancel()
            with suppress(asyncio.CancelledError):
                await rounds
            await scheduler.drain()


def _scheduler(
    settings: CoordinatorSettings, pair: Pair, drafter: RemoteDrafter, verifier: RemoteVerifier, watched: Instruments
) -> Scheduler:
    policy = make_policy(settings.policy, settings.window)
    return Scheduler(
        SequencePool(policy.live_limit(settings.batch_size, settings.lane_count), settings.queue_limit),
        policy,
        _draft_length(settings),
        drafter,
        verifier,
        batch_size=settings.batch_size,
        lanes=settings.lane_count,
        limits=RoundLimits(
            draft_max_length=min(pair.draft.max_length, pair.draft.cache.max_length),
            vocabulary_size=pair.target.vocabulary_size,
            prefill_chunk_tokens=pair.target.cache.prefill_chunk_tokens,
        ),
        metrics=RoundMetrics(watched.registry),
        tracer=RoundTracer(watched.tracer, settings.policy),
    )


def _draft_length(settings: CoordinatorSettings) -> DraftLength:
    if settings.draft_count == "auto":
        return AutoDraftLength(settings.lane_count)
    return FixedDraftLength(settings.draft_count)


def _stop_if_failed(rounds: asyncio.Task[None]) -> None:
    """End the process when the loop is gone: requests would wait for ever, and whoever runs it can start a new one."""
    if not rounds.cancelled() and (error := rounds.exception()):
        log.critical("the scheduling loop failed; stopping", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
