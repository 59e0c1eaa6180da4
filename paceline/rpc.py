"""Servers and channels: options, health, reflection, error translation, graceful stop.

Owns how calls are carried; knows nothing of tokens or models. Servicers raise `PacelineError`s, which become canonical
statuses here, and `translated_errors` turns those back on the client side.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from opentelemetry.trace import Tracer

from paceline.codec.status import error_from_pb, error_to_pb
from paceline.errors import AddressInUse, PacelineError, PeerFailed

log = structlog.get_logger()

MAX_MESSAGE_BYTES = 16 << 20
"""Either way, per message. A group of 64 rows of 32k tokens is 6 MiB."""

DEADLINE_SLACK_S = 0.05
"""On top of the rounding of timeouts on the wire."""

_LIMITS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
_SERVER_OPTIONS = [
    *_LIMITS,
    # Without this a second server shares the port silently instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
]
_CHANNEL_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A peer that restarts is found again soon: by default the pauses between attempts grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turn exceptions into statuses, for unary and server-streaming methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/paceline."):
            return handler
        if handler.unary_unary:
            return handler._replace(unary_unary=_guard_unary(handler.unary_unary))
        if handler.unary_stream:
            return handler._replace(unary_stream=_guard_stream(handler.unary_stream))
        return handler


def _guard_unary(behavior: Handler) -> Handler:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, error)

    return guarded


def _guard_stream(behavior: Handler) -> Handler:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except Exception as error:
            await _abort(context, error)

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, PacelineError):
        log.error("unexpected error in a call", exc_info=error)
        error = PeerFailed("the service failed unexpectedly; its log has the details")
    await context.abort_with_status(rpc_status.to_status(error_to_pb(error)))


def ended_code(context: grpc.aio.ServicerContext[Any, Any], timeout_s: float | None) -> grpc.StatusCode:
    """What a call ended with, asked in a done callback of its context; it had `timeout_s` when it began.

    A call that is cut off under its servicer was cancelled, or its deadline passed: the client says the same of both,
    and perhaps before the deadline that is known here, for the message takes its time, and the wire rounds timeouts up
    by as much as 1 %. Whoever cancels as late as that is taken for timed out.
    """
    if context.done():
        return context.code() or grpc.StatusCode.OK
    remaining_s = context.time_remaining()
    if timeout_s is not None and remaining_s is not None and remaining_s <= DEADLINE_SLACK_S + timeout_s / 100:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise a call's failure as the `PacelineError` its status carries."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        if status is None:
            status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
        raise error_from_pb(status) from error


def open_channel(
    address: str,
    retried_services: Sequence[str] = (),
    *,
    tracer: Tracer | None = None,
    authority: str | None = None,
) -> grpc.aio.Channel:
    """Open a plaintext channel. Calls to `retried_services` are repeated while the peer is UNAVAILABLE, 4 times in all.

    Only for services whose every method is safe to repeat. With a tracer, calls have spans. `authority` is the name
    that the peer is known by, where that is not its address.
    """
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    methods = [{"name": [{"service": service} for service in retried_services], "retryPolicy": retry}]
    config = json.dumps({"methodConfig": methods if retried_services else []})
    interceptors: Sequence[grpc.aio.ClientInterceptor] = []
    if tracer:
        # Not loaded where tracing is off: its import alone reads OpenTelemetry's variables, and fails if one is wrong.
        from paceline.tracing.client import client_interceptors

        interceptors = client_interceptors(tracer, address)
    options = [*_CHANNEL_OPTIONS, ("grpc.service_config", config)]
    if authority:
        options.append(("grpc.default_authority", authority))
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


@dataclass(frozen=True)
class RunningServer:
    address: str
    """`host:port`, with the port that was really bound."""
    health: health.aio.HealthServicer
    service_names: tuple[str, ...]

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks whether this server is ready, for each of its services and for all (``)."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, state)


@asynccontextmanager
async def running_server(
    host: str,
    port: int,
    service_names: Sequence[str],
    add_servicers: Callable[[grpc.aio.Server], None],
    *,
    grace_s: float,
    tracer: Tracer | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; NOT_SERVING until `set_serving`. Leaving lets calls end for up to `grace_s`.

    With a tracer, calls have spans. `interceptors` see calls before and after errors become statuses.
    """
    outermost: list[grpc.aio.ServerInterceptor] = []
    if tracer:
        from paceline.tracing.server import TracingInterceptor

        outermost.append(TracingInterceptor(tracer))
    server = grpc.aio.server(interceptors=[*outermost, *interceptors, ErrorInterceptor()], options=_SERVER_OPTIONS)
    add_servicers(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    running = RunningServer(f"{host}:{_bind(server, host, port)}", health_servicer, tuple(service_names))
    await running.set_serving(False)
    await server.start()
    try:
        yield running
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(grace_s)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: the port is taken or the host is not this machine's; "
            "choose another --port, or 0 for any free one"
        ) from error


async def termination(*, stop_with_stdin: bool = False) -> None:
    """Wait for SIGTERM or SIGINT, or for the end of standard input: then whoever started the process is gone."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stopped.set()

    if stop_with_stdin:
        loop.add_reader(0, read)
    try:
        await stopped.wait()
    finally:
        if stop_with_stdin:
            loop.remove_reader(0)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)
