"""A caller's span in each request's `RequestContext`, because a stream sends its metadata only once.

Ids are sent as plain fields: W3C headers cost the propagators 60 us per hop between model passes that empty the caches.
The rarer `tracestate` and `baggage` are left to the propagators.
"""

from typing import Any

from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags


def set_caller(request: Any, span: SpanContext) -> None:
    """Write the span and the current baggage into a `RequestContext`."""
    caller = request.span
    caller.trace_id = span.trace_id.to_bytes(16, "big")
    caller.span_id = span.span_id
    caller.trace_flags = span.trace_flags
    if span.trace_state or baggage.get_all():
        propagate.inject(caller.headers, trace.set_span_in_context(trace.NonRecordingSpan(span)))
        caller.headers.pop("traceparent", None)


def caller_of(request: Any) -> Context | None:
    """Return the context in a `RequestContext`, with the caller's span; None without a valid span."""
    if not request.HasField("span"):
        return None
    caller = request.span
    trace_id = int.from_bytes(caller.trace_id, "big")
    span = SpanContext(trace_id, caller.span_id, True, TraceFlags(caller.trace_flags & 0xFF))
    if len(caller.trace_id) != 16 or not span.is_valid:
        return None
    if not caller.headers:
        return _within(span, Context())
    traceparent = f"00-{trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    context = propagate.extract({**caller.headers, "traceparent": traceparent})
    extracted = trace.get_current_span(context).get_span_context()
    # OTEL_PROPAGATORS may name only propagators without trace ids; then the plain fields count.
    return context if extracted.is_valid else _within(span, context)


def _within(span: SpanContext, context: Context) -> Context:
    return trace.set_span_in_context(trace.NonRecordingSpan(span), context)
