"""The coordinator's life: find the models, serve, drain."""

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import structlog

from coordinator.background import Background, background
from coordinator.config import CoordinatorSettings
from coordinator.door.admission_threads import AdmissionThreads, admission_threads
from coordinator.door.call import Calls
from coordinator.door.open_streams import OpenStreams
from coordinator.door.record import RequestMetrics
from coordinator.door.servicer import (
    Facts,
    GenerationServicer,
    add_generation_service,
)
from coordinator.door.single_requests import SingleRequests
from coordinator.door.tracer import request_tracer
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.replicas.discovery import HostPort, parse_addresses
from coordinator.replicas.replicas import Replicas
from coordinator.security import CLIENTS_CONNECTION_AGE_S, clients_options, models_security
from coordinator.startup import wait_for_target
from coordinator.wiring import Parts, wired
from paceline.codec.names import GENERATE_STREAM, GENERATE_TEXT, GENERATION_SERVICE, TARGET_SERVICE
from paceline.observe.metrics import CertificateCollector
from paceline.observe.tracing import traced_calls, traced_channel, traced_requests
from paceline.process.instruments import Instruments, instruments
from paceline.process.service import announce, freeze_heap
from paceline.security.channels import ChannelSecurity
from paceline.security.limits import MAX_MESSAGE_BYTES
from paceline.wire import RunningServer, ServerOptions, open_channel, running_server, termination

log = structlog.get_logger()

YOUNG_OBJECTS = 20_000
"""New objects after which the garbage collector looks at them. Those of a round die with it, in no cycles, and with
Python's 700 a round of 64 rows would have its own looked at two or three times."""


async def serve(settings: CoordinatorSettings) -> None:
    with instruments("coordinator", settings) as watched:
        async with running_coordinator(settings, watched) as server:
            freeze_heap()
            gc.set_threshold(YOUNG_OBJECTS)
            announce("coordinator", server.address, watched.metrics_url)
            await termination(stop_with_stdin=settings.stop_with_stdin)


@asynccontextmanager
async def running_coordinator(settings: CoordinatorSettings, watched: Instruments) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; on leaving, running requests get `shutdown_grace_s` to end."""
    # Files and addresses that are wrong are told now, and not once a target is there.
    options, services = clients_options(settings), ModelServices(settings, models_security(settings), watched)
    services.check_addresses()
    watched.registry.register(CertificateCollector("coordinator", options.certificates, services.security.certificates))
    async with background() as tasks, admission_threads() as threads:
        parts = wired(settings, tasks, watched)
        try:
            await services.find(parts, tasks)
            tasks.start(parts.dispatcher.run())
            async with open_door(settings, options, parts, threads, watched) as server:
                server.set_serving(parts.dispatcher.is_serving)
                tasks.start(parts.dispatcher.tell_serving(server.set_serving))
                yield server
        finally:
            await parts.dispatcher.close()


@asynccontextmanager
async def open_door(
    settings: CoordinatorSettings,
    options: ServerOptions,
    parts: Parts,
    threads: AdmissionThreads,
    watched: Instruments,
) -> AsyncIterator[RunningServer]:
    """Let clients call while the block runs. Nothing says yet that the coordinator serves."""
    with request_tracer(watched.tracer) as tracer:
        calls = Calls(parts.model, threads, parts.dispatcher, parts.drafts, RequestMetrics(watched.registry), tracer)
        streams = OpenStreams(
            GENERATE_STREAM,
            calls,
            options.checks,
            traced_requests(watched.tracer),
            most=options.max_concurrent_streams,
            most_bytes=options.max_message_bytes,
            age_s=CLIENTS_CONNECTION_AGE_S,
        )
        servicer = GenerationServicer(_facts(settings, parts), calls, parts.drafts, parts.statistics, streams)
        try:
            async with running_server(
                settings.host,
                settings.port,
                [GENERATION_SERVICE],
                lambda server: add_generation_service(servicer, server),
                grace_s=settings.shutdown_grace_s,
                options=options,
                interceptors=[SingleRequests(GENERATE_TEXT)],
                admitted_interceptors=traced_calls(watched.tracer),
                streams=streams,
            ) as server:
                yield server
        finally:
            await streams.ended()


@dataclass(frozen=True)
class ModelServices:
    """The model services that the settings name, and how they are called."""

    settings: CoordinatorSettings
    security: ChannelSecurity
    watched: Instruments

    def check_addresses(self) -> None:
        """Raise StartupError where plaintext may not go.

        By name, before any is looked up: what a name resolves to later on may be another machine.
        """
        for address in (*parse_addresses(self.settings.target), *self.settings.draft_addresses):
            self.security.check(str(address))

    async def find(self, parts: Parts, tasks: Background) -> None:
        """Begin to watch the replicas; wait for one target, but not for drafts. Raises StartupError."""
        settings = self.settings
        targets: Replicas[RemoteVerifier] = Replicas(
            parse_addresses(settings.target), self._connect_target, parts.model.check_target, parts.dispatcher, tasks
        )
        await targets.refresh()
        tasks.start(targets.run())
        await wait_for_target(
            targets,
            addresses=settings.target,
            timeout_s=settings.startup_timeout_s,
            encrypted=self.security.certificates is not None,
        )
        if not settings.draft_addresses:
            log.info("there is no draft service, as --draft says")
            return
        drafts: Replicas[RemoteDrafter] = Replicas(
            settings.draft_addresses, self._connect_draft, parts.model.check_draft, parts.drafts, tasks
        )
        await drafts.refresh()
        tasks.start(drafts.run())
        # Those that are there are looked at before the first request, so a pair that cannot work is told at once.
        await drafts.looked()
        if not drafts.up:
            log.warning("no draft service is there; decoding plainly until one is", address=settings.draft)

    def _connect_target(self, place: str, address: HostPort) -> RemoteVerifier:
        return RemoteVerifier(self._channel(place, address, [TARGET_SERVICE]), self.settings.call_timeout_s)

    def _connect_draft(self, place: str, address: HostPort) -> RemoteDrafter:
        return RemoteDrafter(self._channel(place, address), self.settings.call_timeout_s)

    def _channel(self, place: str, address: HostPort, retried_services: Sequence[str] = ()) -> grpc.aio.Channel:
        return open_channel(
            place,
            retried_services,
            security=replace(self.security, authority=str(address)),
            wrap=traced_channel(self.watched.tracer),
            # What clients are kept to bounds no group of their requests, nor the target's tokenizer.
            max_message_bytes=max(self.settings.max_message_bytes, MAX_MESSAGE_BYTES),
        )


def _facts(settings: CoordinatorSettings, parts: Parts) -> Facts:
    return Facts(
        settings.batch_size,
        None if settings.draft_count == "auto" else settings.draft_count,
        settings.policy,
        settings.lane_count,
        # Callers that show tokens come from outside, where addresses are of no use.
        shows_addresses=not settings.token_file,
        sources=parts.sources,
        process_count=settings.processes,
        process_index=settings.process_index or 0,
    )
