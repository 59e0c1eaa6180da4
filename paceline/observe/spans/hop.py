"""A caller's span on its way over a stream, whose metadata is sent only once: in each request's `RequestContext`.

Ids go as such: to write and read W3C's headers takes the propagators 60 us a hop between passes that empty the caches.
What else they carry, `tracestate` and `baggage`, is left to them, for there seldom is any.
"""

from typing import Any

from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags

_EMPTY = Context()


def set_caller(request: Any, span: SpanContext) -> None:
    """Name the span, and the current baggage, in a `RequestContext`."""
    caller = request.span
    caller.trace_id = span.trace_id.to_bytes(16, "big")
    caller.span_id = span.span_id
    caller.trace_flags = span.trace_flags
    if span.trace_state or baggage.get_all():
        propagate.inject(caller.headers, trace.set_span_in_context(trace.NonRecordingSpan(span)))
        caller.headers.pop("traceparent", None)


def caller_of(request: Any) -> tuple[Context, SpanContext] | None:
    """The context that came in a `RequestContext`, and the span in it; None without a valid one."""
    if not request.HasField("span"):
        return None
    caller = request.span
    trace_id = int.from_bytes(caller.trace_id, "big")
    span = SpanContext(trace_id, caller.span_id, True, TraceFlags(caller.trace_flags & 0xFF))
    if len(caller.trace_id) != 16 or not span.is_valid:
        return None
    if not caller.headers:
        return _EMPTY, span
    traceparent = f"00-{trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    context = propagate.extract({**caller.headers, "traceparent": traceparent})
    extracted = trace.get_current_span(context).get_span_context()
    # Propagators that know nothing of traces, as OTEL_PROPAGATORS may have it, leave the ids that came as such.
    return context, extracted if extracted.is_valid else span
