"""A caller's span and baggage pass a hop in each request, whatever a request says."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from paceline.observe.spans.hop import caller_of, set_caller
from paceline.observe.spans.request_spans import RequestSpans
from paceline.v1.common_pb2 import CallerSpan, RequestContext
from tests.spans import Spans


def test_a_callers_span_passes_a_hop_with_its_baggage_and_state() -> None:
    span = SpanContext(2**127 + 5, 2**63 + 1, False, TraceFlags(1), TraceState([("vendor", "x")]))
    token = contexts.attach(baggage.set_baggage("tenant", "blue"))
    try:
        request = RequestContext()
        set_caller(request, span)
    finally:
        contexts.detach(token)
    context = caller_of(RequestContext.FromString(request.SerializeToString()))
    assert context is not None
    caller = trace.get_current_span(context).get_span_context()
    assert caller == SpanContext(span.trace_id, span.span_id, True, span.trace_flags, span.trace_state)
    assert dict(baggage.get_all(context)) == {"tenant": "blue"}


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_ids_pass_a_hop_as_they_are(trace_id: int, span_id: int, flags: int) -> None:
    request = RequestContext()
    set_caller(request, SpanContext(trace_id, span_id, False, TraceFlags(flags)))
    assert not request.span.headers
    context = caller_of(request)
    assert context is not None
    caller = trace.get_current_span(context).get_span_context()
    assert caller == SpanContext(trace_id, span_id, True, TraceFlags(flags))


@given(
    st.binary(max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.dictionaries(st.text(), st.text())
)
def test_whatever_a_request_names_as_its_caller_does_no_harm(
    trace_id: bytes, span_id: int, flags: int, headers: dict[str, str]
) -> None:
    span = CallerSpan(trace_id=trace_id, span_id=span_id, trace_flags=flags, headers=headers)
    context = caller_of(RequestContext(span=span))
    assert (context is not None) == (len(trace_id) == 16 and any(trace_id) and span_id != 0)


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_wall_clock_that_is_set_makes_no_cancelled_request_one_out_of_time(
    jump_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, request = Spans(), RequestContext(timeout_s=60)
    set_caller(request, SpanContext(1, 2, False, TraceFlags(1)))
    set_ns = time.time_ns() + jump_s * 10**9
    with pytest.raises(asyncio.CancelledError), RequestSpans(spans.tracer).request("/paceline.v1.S/M", request):
        monkeypatch.setattr(time, "time_ns", lambda: set_ns)
        raise asyncio.CancelledError
    (span,) = spans()
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"
