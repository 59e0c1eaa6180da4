"""Servers: options, health, reflection, admission and graceful stop."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc

from paceline.security.access import Check
from paceline.security.certificates import Certificates, server_credentials
from paceline.security.limits import MAX_CONCURRENT_STREAMS, MAX_MESSAGE_BYTES, message_limits
from paceline.wire.access import AccessInterceptor
from paceline.wire.health import Health, Status
from paceline.wire.lasting import HeardCalls, LastingServer, without_registration
from paceline.wire.ports import Listening, host_port
from paceline.wire.reflection import add_reflection
from paceline.wire.status import ErrorInterceptor

log = structlog.get_logger()

_OPTIONS = [
    # Callers may ping so often, with calls or without; gRPC would end connections with pings under 5 minutes apart.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
"""Milliseconds after which a vanished caller is noticed and its calls cancelled; gRPC's default is two hours."""
LIVENESS_NAME = "liveness"
"""Name under which health checks tell that the process answers, whether it can serve now or not, until it stops."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server, made from a service's settings."""

    certificates: Certificates | None = None
    """None for plaintext. With a CA, callers must show a certificate that it vouches for."""
    checks: tuple[Check, ...] = ()
    """Checks that every call except a health check must pass before it is read."""
    health_port: int | None = None
    """Additional plaintext port for health checks; 0 for any free port, None for no such port."""
    reflection: bool = True
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_streams: int = MAX_CONCURRENT_STREAMS
    shares_port: bool = False
    """Whether other processes may listen on the same ports; connections are spread among them."""
    max_connection_age_s: float | None = None
    """Seconds, plus or minus a tenth, until a connection takes no new calls and callers look up the name again.
    Calls under way finish. None for no limit."""


@dataclass(frozen=True)
class RunningServer:
    address: str
    """`host:port` with the bound port."""
    health: Health
    service_names: tuple[str, ...]
    health_address: str | None = None
    """`host:port` of the additional plaintext health checks; None without them."""

    def set_serving(self, serving: bool) -> None:
        """Set the health status of each service and of the whole server (``)."""
        state = Status.SERVING if serving else Status.NOT_SERVING
        for name in ("", *self.service_names):
            self.health.set(name, state)


class Streams(Protocol):
    """Request streams that callers keep open, so that the server has to end them."""

    def end_streams(self) -> None:
        """Have all open streams end after what is under way on them."""
        ...

    def close(self) -> None:
        """As `end_streams`, and for streams that begin later too."""
        ...


@asynccontextmanager
async def running_server(
    host: str,
    port: int,
    service_names: Sequence[str],
    add_servicers: Callable[[grpc.aio.Server], None],
    *,
    grace_s: float,
    options: ServerOptions = ServerOptions(),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    admitted_interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    streams: Streams | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; NOT_SERVING until `set_serving`. On exit, calls have up to `grace_s` to end.

    `interceptors` see all calls, `admitted_interceptors` those that passed the checks. `streams` end when the server
    stops. Raise AddressInUse or StartupError.
    """
    health_servicer = Health()
    credentials = server_credentials(options.certificates) if options.certificates else None

    def make(port: int) -> tuple[grpc.aio.Server, int]:
        server = without_registration(_make_server(options, [calls, *interceptors], admitted_interceptors))
        add_servicers(server)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if options.reflection:
            add_reflection(server, [*service_names, health.SERVICE_NAME])
        return server, _bind(server, Listening("--port", host, port), credentials)

    calls = HeardCalls()
    server = LastingServer(make, port, calls, streams.end_streams if streams else lambda: None)
    address = host_port(host, server.port)
    async with _health_server(host, options, health_servicer) as health_address:
        running = RunningServer(address, health_servicer, tuple(service_names), health_address)
        running.set_serving(False)
        health_servicer.set(LIVENESS_NAME, Status.SERVING)
        await server.start()
        try:
            yield running
        finally:
            health_servicer.end()
            if streams:
                streams.close()
            await server.stop(grace_s)


def _make_server(
    options: ServerOptions,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    admitted_interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> grpc.aio.Server:
    access = [AccessInterceptor(options.checks)] if options.checks else []
    inner = [*access, *admitted_interceptors, ErrorInterceptor()]
    limits: list[tuple[str, Any]] = [
        *message_limits(options.max_message_bytes),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
    ]
    if options.max_connection_age_s is not None:
        limits.append(("grpc.max_connection_age_ms", round(options.max_connection_age_s * 1000)))
    return grpc.aio.server(interceptors=[*interceptors, *inner], options=[*limits, *_common(options)])


def _common(options: ServerOptions) -> list[tuple[str, int]]:
    """Return gRPC's options of every server, the one for health checks alone included."""
    return [
        *_OPTIONS,
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # a minute without this (seen with grpcio 1.85.1)
        # By gRPC's default a second server silently shares the port instead of failing.
        ("grpc.so_reuseport", int(options.shares_port)),
    ]


@asynccontextmanager
async def _health_server(host: str, options: ServerOptions, servicer: Health) -> AsyncIterator[str | None]:
    """Serve only health checks, in plaintext for callers without TLS such as Kubernetes' probes.

    Yield the address; None without a port.
    """
    if options.health_port is None:
        yield None
        return
    calls = HeardCalls()

    def make(port: int) -> tuple[grpc.aio.Server, int]:
        server = without_registration(grpc.aio.server(interceptors=[calls], options=_common(options)))
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        return server, _bind(server, Listening("--health-port", host, port), None)

    # It lasts as the main port does: probes that it no longer answered would have the process restarted.
    server = LastingServer(make, options.health_port, calls, lambda: None)
    address = host_port(host, server.port)
    await server.start()
    log.info("health checks are answered in plaintext", address=address)
    try:
        yield address
    finally:
        await server.stop(0)


def _bind(server: grpc.aio.Server, place: Listening, credentials: grpc.ServerCredentials | None) -> int:
    address = host_port(place.host, place.port)
    try:
        if credentials:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise place.refused_by_grpc(error) from error
