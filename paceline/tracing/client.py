"""A channel whose calls have spans, and carry their context in their metadata.

A call is traced inside a trace; outside of any, only where it begins one (`conventions.starts_trace`). Why not gRPC's
interceptors: they run every unary call in a task of its own, at a quarter of a millisecond a round.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Tracer

from paceline.tracing.conventions import call_attributes, end_call, span_name, starts_trace

Metadata = Iterable[tuple[str, str | bytes]]


class TracedChannel(grpc.aio.Channel):
    """Is to a stub what the channel within is, but that its unary calls begin when they are awaited."""

    def __init__(self, channel: grpc.aio.Channel, tracer: Tracer, address: str) -> None:
        self._channel = channel
        self._tracer = tracer
        host, _, port = address.rpartition(":")
        self._server: dict[str, str | int] = {"server.address": host or address}
        if host and port.isdecimal():
            self._server["server.port"] = int(port)
        self._watchers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *codec: Any, **named: Any) -> Any:
        make_call: Callable[..., Any] = self._channel.unary_unary(method, *codec, **named)

        async def call(request: Any, *, metadata: Metadata = (), **how: Any) -> Any:
            span = self._start(method)
            if span is None:
                return await make_call(request, metadata=tuple(metadata), **how)
            code = grpc.StatusCode.UNKNOWN
            try:
                response = await make_call(request, metadata=_carrying(span, metadata), **how)
                code = grpc.StatusCode.OK
                return response
            except grpc.aio.AioRpcError as error:
                code = error.code()
                raise
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                end_call(span, SpanKind.CLIENT, code)

        return call

    def unary_stream(self, method: str, *codec: Any, **named: Any) -> Any:
        make_call: Callable[..., Any] = self._channel.unary_stream(method, *codec, **named)

        def call(request: Any, *, metadata: Metadata = (), **how: Any) -> Any:
            span = self._start(method)
            if span is None:
                return make_call(request, metadata=tuple(metadata), **how)
            made = make_call(request, metadata=_carrying(span, metadata), **how)
            # The stream may be left before its end, so not its reader ends the span but whoever sees the call end.
            watcher = asyncio.create_task(_end_with(made, span))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
            return made

        return call

    def stream_unary(self, method: str, *codec: Any, **named: Any) -> Any:
        return self._channel.stream_unary(method, *codec, **named)

    def stream_stream(self, method: str, *codec: Any, **named: Any) -> Any:
        make_call: Callable[..., Any] = self._channel.stream_stream(method, *codec, **named)

        def call(request_iterator: Any = None, **how: Any) -> Any:
            stream = make_call(request_iterator, **how)
            return TracedStream(stream, partial(self._start, method)) if request_iterator is None else stream

        return call

    def _start(self, method: str) -> Span | None:
        """Start the call's span; None where the call is not traced."""
        if not trace.get_current_span().is_recording() and not starts_trace(method):
            return None
        attributes = self._server | call_attributes(method)
        return self._tracer.start_span(span_name(method), kind=SpanKind.CLIENT, attributes=attributes)


class TracedStream:
    """Is to an `Exchange` what the stream within is. From a request to its answer is a call of its own."""

    def __init__(self, stream: Any, start: Callable[[], Span | None]) -> None:
        self._stream = stream
        self._start = start
        self._span: Span | None = None
        self._ends = 0.0

    async def write(self, request: Any) -> None:
        self._span = self._start()
        self._ends = time.perf_counter() + request.context.timeout_s
        if self._span:
            propagate.inject(request.context.trace_headers, trace.set_span_in_context(self._span))
        with self._ending_if_it_fails():
            await self._stream.write(request)

    async def read(self) -> Any:
        with self._ending_if_it_fails():
            answer = await self._stream.read()
        self._end(grpc.StatusCode.UNAVAILABLE if answer is grpc.aio.EOF else grpc.StatusCode.OK)
        return answer

    async def done_writing(self) -> None:
        await self._stream.done_writing()

    def done(self) -> bool:
        return bool(self._stream.done())

    def cancel(self) -> bool:
        return bool(self._stream.cancel())

    @contextmanager
    def _ending_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self._end(error.code())
            raise
        except asyncio.InvalidStateError:
            self._end(grpc.StatusCode.UNAVAILABLE)
            raise
        except asyncio.CancelledError:
            is_late = time.perf_counter() >= self._ends
            self._end(grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED)
            raise

    def _end(self, code: grpc.StatusCode) -> None:
        if self._span:
            end_call(self._span, SpanKind.CLIENT, code)


def _carrying(span: Span, metadata: Metadata) -> Metadata:
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    return (*metadata, *carrier.items())


async def _end_with(call: Any, span: Span) -> None:
    code = grpc.StatusCode.CANCELLED
    try:
        code = await call.code()
    finally:
        end_call(span, SpanKind.CLIENT, code)
