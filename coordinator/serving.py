"""The coordinator's life: find the models, serve, drain. Everything is put together here."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import grpc
import structlog

from coordinator.background import Background, background
from coordinator.cluster_metrics import ClusterCollector
from coordinator.config import CoordinatorSettings
from coordinator.door.admission import Admission
from coordinator.door.admission_threads import admission_threads
from coordinator.door.current_model import CurrentModel
from coordinator.door.limits import RequestLimits
from coordinator.door.record import RequestMetrics
from coordinator.door.served import Served
from coordinator.door.servicer import SERVICE_NAME, Facts, GenerationServicer, add_generation_service
from coordinator.drafting.ahead import AheadDrafter
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.placement.dispatcher import Dispatcher, MakeServing
from coordinator.placement.guarded_target import GuardedTarget, UsualTime
from coordinator.placement.target import Serving
from coordinator.protocols import RemoteTarget
from coordinator.replicas.clients import TARGET_SERVICE, RemoteDrafter, RemoteVerifier
from coordinator.replicas.discovery import HostPort, parse_addresses
from coordinator.replicas.replica import Replica
from coordinator.replicas.replicas import Replicas
from coordinator.rounds.draft_length import AutoDraftLength, DraftLength, FixedDraftLength
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.policies import make_policy
from coordinator.rounds.pool import GenerationPool
from coordinator.rounds.residency import Residency
from coordinator.rounds.round import RoundLimits
from coordinator.rounds.scheduler import Scheduler
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.tracer import RoundTracer
from coordinator.security import clients_options, models_security
from coordinator.startup import wait_for_target
from paceline.observe.tracing import traced_calls, traced_channel
from paceline.process.instruments import Instruments, instruments
from paceline.process.service import announce, freeze_heap
from paceline.security.channels import ChannelSecurity
from paceline.wire import RunningServer, open_channel, running_server, termination

log = structlog.get_logger()


async def serve(settings: CoordinatorSettings) -> None:
    with instruments("coordinator", settings) as watched:
        async with running_coordinator(settings, watched) as server:
            freeze_heap()
            announce("coordinator", server.address, watched.metrics_url)
            await termination(stop_with_stdin=settings.stop_with_stdin)


@asynccontextmanager
async def running_coordinator(settings: CoordinatorSettings, watched: Instruments) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; on leaving, running requests get `shutdown_grace_s` to end."""
    options, security = clients_options(settings), models_security(settings)
    # By name, before any is looked up: what a name resolves to later on may be another machine.
    for address in (*parse_addresses(settings.target), *parse_addresses(settings.draft)):
        security.check(str(address))
    async with background() as tasks, admission_threads() as threads:
        drafter, statistics = ReplicatedDrafter(), Statistics()
        ahead = AheadDrafter(drafter, watched.tracer)
        residency = Residency(ahead)
        dispatcher = Dispatcher(
            _serving_maker(settings, ahead, residency, statistics, watched),
            residency,
            tasks,
            queue_limit=settings.queue_limit,
            target_wait_s=settings.target_wait_s,
        )
        try:
            model = CurrentModel(partial(_admission, settings), dispatcher, drafter)
            await _find_models(settings, security, model, drafter, dispatcher, tasks, watched)
            watched.registry.register(ClusterCollector(dispatcher, drafter, ahead, statistics))
            servicer = GenerationServicer(
                facts_of(settings), model, threads, dispatcher, drafter, statistics, RequestMetrics(watched.registry)
            )
            tasks.start(dispatcher.run())
            async with running_server(
                settings.host,
                settings.port,
                [SERVICE_NAME],
                lambda server: add_generation_service(servicer, server),
                grace_s=settings.shutdown_grace_s,
                options=options,
                admitted_interceptors=traced_calls(watched.tracer),
            ) as server:
                await server.set_serving(dispatcher.is_serving)
                tasks.start(dispatcher.tell_serving(server.set_serving))
                yield server
        finally:
            await dispatcher.close()


async def _find_models(
    settings: CoordinatorSettings,
    security: ChannelSecurity,
    model: CurrentModel,
    drafter: ReplicatedDrafter,
    dispatcher: Dispatcher,
    tasks: Background,
    watched: Instruments,
) -> None:
    """Begin to watch the replicas; wait for one target, but not for drafts. Raises StartupError."""

    def channel(place: str, address: HostPort, retried_services: Sequence[str] = ()) -> grpc.aio.Channel:
        return open_channel(
            place,
            retried_services,
            authority=str(address),
            security=security,
            wrap=traced_channel(watched.tracer),
            max_message_bytes=settings.max_message_bytes,
        )

    def connect_target(place: str, address: HostPort) -> RemoteVerifier:
        return RemoteVerifier(channel(place, address, [TARGET_SERVICE]), settings.call_timeout_s)

    def connect_draft(place: str, address: HostPort) -> RemoteDrafter:
        return RemoteDrafter(channel(place, address), settings.call_timeout_s)

    targets: Replicas[RemoteVerifier] = Replicas(
        parse_addresses(settings.target), connect_target, model.check_target, dispatcher, tasks
    )
    await targets.refresh()
    tasks.start(targets.run())
    await wait_for_target(
        targets,
        addresses=settings.target,
        timeout_s=settings.startup_timeout_s,
        encrypted=security.certificates is not None,
    )
    drafts: Replicas[RemoteDrafter] = Replicas(
        parse_addresses(settings.draft), connect_draft, model.check_draft, drafter, tasks
    )
    await drafts.refresh()
    tasks.start(drafts.run())
    # Those that are there are looked at before the first request, so that a pair that cannot work is told at once.
    await drafts.looked()
    if not drafts.up:
        log.warning("no draft service is there; decoding plainly until one is", address=settings.draft)


def _admission(settings: CoordinatorSettings, served: Served) -> Admission:
    limits = RequestLimits(
        settings.max_prompt_tokens,
        settings.max_output_tokens,
        settings.max_completions,
        max_together=_places(settings) + settings.queue_limit,
    )
    return Admission(served, default_max_new_tokens=settings.max_new_tokens, limits=limits)


def facts_of(settings: CoordinatorSettings) -> Facts:
    return Facts(
        settings.batch_size,
        None if settings.draft_count == "auto" else settings.draft_count,
        settings.policy,
        settings.lane_count,
        # Callers that show tokens come from outside, where addresses are of no use.
        shows_addresses=not settings.token_file,
    )


def _serving_maker(
    settings: CoordinatorSettings,
    drafter: AheadDrafter,
    residency: Residency,
    statistics: Statistics,
    watched: Instruments,
) -> MakeServing:
    """Return what makes the scheduler of a target; all of them count together."""
    metrics, tracer = RoundMetrics(watched.registry), RoundTracer(watched.tracer, settings.policy)
    usual = UsualTime()

    def make(replica: Replica[RemoteTarget], dispatcher: Dispatcher) -> Serving:
        target = replica.description
        assert target
        guard = GuardedTarget(replica.remote, target.vocabulary_size, usual)
        scheduler = Scheduler(
            replica.address,
            GenerationPool(_places(settings), on_room=dispatcher.distribute),
            make_policy(settings.policy, settings.window),
            _draft_length(settings),
            drafter,
            guard,
            residency,
            dispatcher,
            batch_size=settings.batch_size,
            lanes=settings.lane_count,
            limits=RoundLimits(
                target.vocabulary_size,
                target.cache.prefill_chunk_tokens,
                target.cache.token_bytes,
                target.cache.page_tokens,
            ),
            statistics=statistics,
            metrics=metrics,
            tracer=tracer,
        )
        return Serving(guard, scheduler)

    return make


def _places(settings: CoordinatorSettings) -> int:
    """Return how many generations are live at once on a target."""
    policy = make_policy(settings.policy, settings.window)
    return policy.live_limit(settings.batch_size, settings.lane_count)


def _draft_length(settings: CoordinatorSettings) -> DraftLength:
    if settings.draft_count == "auto":
        return AutoDraftLength(settings.lane_count)
    return FixedDraftLength(settings.draft_count)
