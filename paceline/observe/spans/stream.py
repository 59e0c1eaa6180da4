"""The calling side of a request stream. Each request with its answer has a span, like a separate call."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

from paceline.codec.rounds import is_unasked
from paceline.observe.spans.conventions import end_call, start_call
from paceline.observe.spans.hop import set_caller
from paceline.wire.status import cut_off_code


class TracedStream:
    """A stream that an `Exchange` uses like the wrapped one. Requests outside any span are not traced."""

    def __init__(self, stream: Any, tracer: Tracer, method: str, server: Mapping[str, str | int]) -> None:
        """`server` has the span attributes that describe the server."""
        self._stream = stream
        self._tracer = tracer
        self._method = method
        self._server = server
        self._waiting: deque[_Asked] = deque()
        """Requests without an answer, in their order."""

    async def write(self, request: Any) -> None:
        self._begin(request.context)
        try:
            await self._stream.write(request)
        except BaseException as error:
            self._end_all(error)
            raise

    async def read(self) -> Any:
        try:
            message = await self._stream.read()
        except BaseException as error:
            self._end_all(error)
            raise
        if message is grpc.aio.EOF:
            self._end_all(None)
        elif not is_unasked(message) and self._waiting:
            self._waiting.popleft().end(grpc.StatusCode.OK)
        return message

    async def done_writing(self) -> None:
        await self._stream.done_writing()

    def done(self) -> bool:
        return bool(self._stream.done())

    def cancel(self) -> bool:
        return bool(self._stream.cancel())

    def _begin(self, request: Any) -> None:
        span = None
        if trace.get_current_span().is_recording():
            span = start_call(self._tracer, self._method, SpanKind.CLIENT, server=self._server)
            set_caller(request, span.get_span_context())
        self._waiting.append(_Asked(span, time.monotonic(), request.timeout_s))

    def _end_all(self, error: BaseException | None) -> None:
        """End the spans of requests that get no answer any more."""
        while self._waiting:
            asked = self._waiting.popleft()
            asked.end(asked.code_of(error))


@dataclass(frozen=True)
class _Asked:
    span: Span | None
    """None when the request is not traced."""
    began_s: float
    timeout_s: float

    def end(self, code: grpc.StatusCode) -> None:
        if self.span:
            end_call(self.span, SpanKind.CLIENT, code)

    def code_of(self, error: BaseException | None) -> grpc.StatusCode:
        if isinstance(error, grpc.aio.AioRpcError):
            return error.code()
        if isinstance(error, asyncio.CancelledError):
            return cut_off_code(self.timeout_s - (time.monotonic() - self.began_s), self.timeout_s)
        return grpc.StatusCode.UNAVAILABLE
