"""Client interceptors for grpc.aio: a span a call, and its context in the call's metadata.

A call is traced inside a trace; outside of any, only where it begins one (`conventions.starts_trace`).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Tracer

from paceline.tracing.conventions import call_attributes, end_call, span_name, starts_trace

Details = grpc.aio.ClientCallDetails


def client_interceptors(tracer: Tracer, address: str) -> Sequence[grpc.aio.ClientInterceptor]:
    """Interceptors of a channel to `address`."""
    # Two objects: grpc.aio takes an interceptor for one kind of call only, whatever it implements.
    return [_UnaryInterceptor(tracer, address), _StreamInterceptor(tracer, address)]


class _CallTracer:
    def __init__(self, tracer: Tracer, address: str) -> None:
        self._tracer = tracer
        host, _, port = address.rpartition(":")
        self._server: dict[str, str | int] = {"server.address": host or address}
        if host and port.isdecimal():
            self._server["server.port"] = int(port)

    def start(self, details: Details) -> tuple[Span, Details] | None:
        """Start the call's span; return it and the details that carry it. None where the call is not traced."""
        method = _text(details.method)
        if not trace.get_current_span().is_recording() and not starts_trace(method):
            return None
        attributes = self._server | call_attributes(method)
        span = self._tracer.start_span(span_name(method), kind=SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
        return span, details._replace(metadata=metadata)  # type: ignore[attr-defined]


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method  # grpc.aio gives bytes


class _UnaryInterceptor(_CallTracer, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Details, request: Any) -> Any:
        started = self.start(details)
        if started is None:
            return await continuation(details, request)
        span, details = started
        code = grpc.StatusCode.UNKNOWN
        try:
            call = await continuation(details, request)
            # Its code is not awaited instead: a call that could not even be sent never gets one.
            await call
            code = grpc.StatusCode.OK
            return call
        except grpc.aio.AioRpcError as error:
            code = error.code()
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            end_call(span, SpanKind.CLIENT, code)


class _StreamInterceptor(_CallTracer, grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, tracer: Tracer, address: str) -> None:
        super().__init__(tracer, address)
        self._watchers: set[asyncio.Task[None]] = set()

    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Details, request: Any) -> Any:
        started = self.start(details)
        if started is None:
            return await continuation(details, request)
        span, details = started
        call = await continuation(details, request)
        # The stream may be left before its end, so not its reader ends the span but whoever sees the call end.
        watcher = asyncio.create_task(_end_with(call, span))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return call


async def _end_with(call: Any, span: Span) -> None:
    code = grpc.StatusCode.CANCELLED
    try:
        code = await call.code()
    finally:
        end_call(span, SpanKind.CLIENT, code)
