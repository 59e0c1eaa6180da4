"""The calling side of a request stream. Each request with its answer has a span, like a separate call."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from paceline.observe.spans.conventions import end_call, start_call
from paceline.observe.spans.hop import set_caller
from paceline.observe.spans.lean import LeanTracer
from paceline.wire.status import cut_off_code


class TracedStream:
    """A stream that an `Exchange` uses like the wrapped one. Requests outside any span are not traced."""

    def __init__(self, stream: Any, tracer: LeanTracer, method: str, server: Mapping[str, str | int]) -> None:
        """`server` has the span attributes that describe the server."""
        self._stream = stream
        self._tracer = tracer
        self._method = method
        self._server = server
        self._around: Span | None = None
        """The span around the current request; None when the request is not traced."""
        self._span_id = self._began_ns = 0
        self._timeout_s = 0.0

    async def write(self, request: Any) -> None:
        self._begin(request.context)
        try:
            await self._stream.write(request)
        except asyncio.InvalidStateError:
            self._around = None  # the stream had ended, so nothing was sent
            raise
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
        around = trace.get_current_span()
        self._around = around if around.is_recording() else None
        if self._around:
            parent = around.get_span_context()
            self._span_id, self._began_ns = self._tracer.new_span_id(), time.time_ns()
            self._timeout_s = request.timeout_s
            set_caller(
                request,
                trace.SpanContext(parent.trace_id, self._span_id, False, parent.trace_flags, parent.trace_state),
            )

    def _end(self, code: grpc.StatusCode) -> None:
        if self._around:
            self._tracer.later(partial(self._make, self._around, self._span_id, self._began_ns, time.time_ns(), code))

    def _make(self, around: Span, span_id: int, began_ns: int, ended_ns: int, code: grpc.StatusCode) -> None:
        context = trace.set_span_in_context(around)
        span = start_call(
            self._tracer, self._method, SpanKind.CLIENT, context, self._server, start_time=began_ns, span_id=span_id
        )
        end_call(span, SpanKind.CLIENT, code, ended_ns)

    def _code_of(self, error: BaseException) -> grpc.StatusCode:
        if isinstance(error, grpc.aio.AioRpcError):
            return error.code()
        if isinstance(error, asyncio.CancelledError):
            return cut_off_code(self._timeout_s - (time.time_ns() - self._began_ns) / 1e9, self._timeout_s)
        return grpc.StatusCode.UNAVAILABLE
