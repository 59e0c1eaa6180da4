"""The calling side of a request stream. Each request with its answer has a span, like a separate call."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

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
        self._span: Span | None = None
        """The span of the current request; None when the request is not traced."""
        self._began_s = self._timeout_s = 0.0

    async def write(self, request: Any) -> None:
        self._begin(request.context)
        try:
            await self._stream.write(request)
        except BaseException as error:
            self._end(self._code_of(error))
            raise

    async def read(self) -> Any:
        try:
            answer = await self._stream.read()
        except BaseException as error:
            self._end(self._code_of(error))
            raise
        self._end(grpc.StatusCode.UNAVAILABLE if answer is grpc.aio.EOF else grpc.StatusCode.OK)
        return answer

    async def done_writing(self) -> None:
        await self._stream.done_writing()

    def done(self) -> bool:
        return bool(self._stream.done())

    def cancel(self) -> bool:
        return bool(self._stream.cancel())

    def _begin(self, request: Any) -> None:
        if trace.get_current_span().is_recording():
            self._began_s, self._timeout_s = time.monotonic(), request.timeout_s
            self._span = start_call(self._tracer, self._method, SpanKind.CLIENT, server=self._server)
            set_caller(request, self._span.get_span_context())

    def _end(self, code: grpc.StatusCode) -> None:
        if self._span:
            end_call(self._span, SpanKind.CLIENT, code)
            self._span = None

    def _code_of(self, error: BaseException) -> grpc.StatusCode:
        if isinstance(error, grpc.aio.AioRpcError):
            return error.code()
        if isinstance(error, asyncio.CancelledError):
            return cut_off_code(self._timeout_s - (time.monotonic() - self._began_s), self._timeout_s)
        return grpc.StatusCode.UNAVAILABLE
