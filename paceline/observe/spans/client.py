"""A channel whose calls have spans and carry the span's context in their metadata; see `TracedStream` for streams.

A call is traced inside a trace, or when it begins one (`conventions.starts_trace`). gRPC's own interceptors are not
used, because they run every unary call in a separate task, at a quarter of a millisecond per round.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Tracer

from paceline.codec.names import GENERATE_STREAM
from paceline.observe.spans.conventions import end_call, start_call, starts_trace
from paceline.observe.spans.stream import TracedStream
from paceline.tasks import kept_task
from paceline.wire.status import code_of

Metadata = Iterable[tuple[str, str | bytes]]


class TracedChannel(grpc.aio.Channel):
    """A channel that stubs use like the wrapped one, except that unary calls begin when they are awaited."""

    def __init__(self, channel: grpc.aio.Channel, tracer: Tracer, address: str) -> None:
        self._channel = channel
        self._tracer = tracer
        self._server = _server_of(address)
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
            try:
                made = make_call(request, metadata=_carrying(span, metadata), **how)
            except Exception:  # the channel is closed: there is no call that could end
                end_call(span, SpanKind.CLIENT, grpc.StatusCode.UNKNOWN)
                raise
            # The reader may leave the stream early, so a task that waits for the call's end closes the span.
            kept_task(_end_with(made, span), self._watchers)
            return made

        return call

    def stream_unary(self, method: str, *codec: Any, **named: Any) -> Any:
        return self._channel.stream_unary(method, *codec, **named)

    def stream_stream(self, method: str, *codec: Any, **named: Any) -> Any:
        make_call: Callable[..., Any] = self._channel.stream_stream(method, *codec, **named)

        def call(request_iterator: Any = None, **how: Any) -> Any:
            stream = make_call(request_iterator, **how)
            # The calls of a stream of calls have spans, by `call_span`; it has none.
            is_of_calls = method == GENERATE_STREAM
            return (
                stream if request_iterator or is_of_calls else TracedStream(stream, self._tracer, method, self._server)
            )

        return call

    def _start(self, method: str) -> Span | None:
        """Start the call's span; return None when the call is not traced."""
        if not trace.get_current_span().is_recording() and not starts_trace(method):
            return None
        return start_call(self._tracer, method, SpanKind.CLIENT, server=self._server)


@contextmanager
def call_span(tracer: Tracer, method: str, address: str) -> Iterator[dict[str, str]]:
    """Give the call of the block, on a stream of calls, a span. Yield the headers that name it to the server."""
    span, code = start_call(tracer, method, SpanKind.CLIENT, server=_server_of(address)), grpc.StatusCode.OK
    headers: dict[str, str] = {}
    propagate.inject(headers, trace.set_span_in_context(span))
    try:
        yield headers
    except (asyncio.CancelledError, GeneratorExit):
        code = grpc.StatusCode.CANCELLED
        raise
    except Exception as error:
        code = code_of(error)
        raise
    finally:
        end_call(span, SpanKind.CLIENT, code)


def _server_of(address: str) -> dict[str, str | int]:
    """Return the span attributes that describe a server."""
    host, _, port = address.rpartition(":")
    named: dict[str, str | int] = {"server.address": host or address}
    return named | {"server.port": int(port)} if host and port.isdecimal() else named


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
