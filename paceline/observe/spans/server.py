"""The server interceptor that makes a span per call, as a child of the span in the call's metadata.

Request streams get theirs from `RequestSpans`. The interceptor runs outside `ErrorInterceptor`, which lets only
aborts through. The span is current while the handler runs. A unary call's span ends with its handler, a response
stream's with the call, whatever the cause.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Tracer

from paceline.observe.spans.conventions import end_call, start_call, starts_trace
from paceline.security.access import Context
from paceline.wire.handlers import WrappingInterceptor, wrap
from paceline.wire.status import cut_off_code, tell_end


class TracingInterceptor(WrappingInterceptor):
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method: str = details.method
        if handler.request_streaming:
            return handler
        parent = propagate.extract(_carrier(details.invocation_metadata or ()))
        if not trace.get_current_span(parent).get_span_context().is_valid and not starts_trace(method):
            return handler
        return wrap(
            handler,
            unary=lambda behavior: self._trace_unary(behavior, method, parent),
            stream=lambda behavior: self._trace_stream(behavior, method, parent),
        )

    def _trace_unary(self, behavior: Callable[..., Any], method: str, parent: contexts.Context) -> Callable[..., Any]:
        async def traced(request: Any, context: Context) -> Any:
            span, timeout_s = self._start(method, parent), context.time_remaining()
            code = grpc.StatusCode.OK
            try:
                return await behavior(request, context)
            except asyncio.CancelledError:
                code = cut_off_code(context.time_remaining(), timeout_s)
                raise
            except Exception:
                code = _answered(context) or grpc.StatusCode.UNKNOWN
                raise
            finally:
                end_call(span, SpanKind.SERVER, code)

        return traced

    def _trace_stream(self, behavior: Callable[..., Any], method: str, parent: contexts.Context) -> Callable[..., Any]:
        async def traced(request: Any, context: Context) -> AsyncIterator[Any]:
            span = self._start(method, parent)
            answered_ns: int | None = None

            def ended(code: grpc.StatusCode) -> None:
                # Not now, because handlers' own callbacks run after this one and may still add to the span.
                asyncio.get_running_loop().call_soon(partial(end_call, span, SpanKind.SERVER, code, answered_ns))

            # The handler may be suspended between two messages and would not see the call's end.
            tell_end(context, context.time_remaining(), ended)
            async for response in behavior(request, context):
                yield response
            # Taken before the client can see the end; the done callback comes after that.
            answered_ns = time.time_ns()

        return traced

    def _start(self, method: str, parent: contexts.Context) -> Span:
        """Start the call's span and make it current in the call's task. It need not be detached: the task ends too."""
        span = start_call(self._tracer, method, SpanKind.SERVER, parent)
        contexts.attach(trace.set_span_in_context(span, parent))
        return span


def _carrier(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the text entries by key, the first of each key."""
    carrier: dict[str, str] = {}
    for key, value in metadata:
        if isinstance(value, str):
            carrier.setdefault(key, value)
    return carrier


def _answered(context: Context) -> grpc.StatusCode | None:
    """Return the status code that was set; None without one."""
    code: Any = context.code()
    return code if isinstance(code, grpc.StatusCode) else None
