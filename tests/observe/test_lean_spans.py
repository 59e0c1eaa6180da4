"""The project's own spans equal the SDK's for exporters and samplers."""

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, Tracer, TraceState

from paceline.observe.spans.hop import caller_of, set_caller
from paceline.observe.spans.provider import make_provider, make_tracer
from paceline.v1.common_pb2 import CallerSpan, RequestContext
from tests.spans import Spans

SECRET = "the prompt that no span may hold"
REMOTE = SpanContext(7, 8, True, TraceFlags(TraceFlags.SAMPLED))


def exported(tracers_name: str) -> bytes:
    """Return the OTLP bytes of the same span from our tracer or the SDK's; ids and times are fixed or left out."""
    exporter = InMemorySpanExporter()
    provider = make_provider("test")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracers: Mapping[str, Tracer] = {"lean": make_tracer(provider), "sdk": provider.get_tracer("paceline")}
    parent = trace.set_span_in_context(trace.NonRecordingSpan(REMOTE))
    span = tracers[tracers_name].start_span(
        "round", parent, SpanKind.CLIENT, {"a": 1, "b": (0.5, 1.5)}, [Link(REMOTE)], start_time=1_000
    )
    span.set_attribute("c", "text")
    span.set_attributes({"d": True})
    span.add_link(SpanContext(9, 10, False, TraceFlags(1)), {"e": 5})
    span.set_status(StatusCode.ERROR)
    span.update_name("renamed")
    span.end(2_000)
    message = encode_spans(exporter.get_finished_spans())
    message.resource_spans[0].ClearField("resource")  # each provider has its own id
    message.resource_spans[0].scope_spans[0].spans[0].ClearField("span_id")
    return message.SerializeToString(deterministic=True)


def test_on_the_wire_a_lean_span_is_the_sdks() -> None:
    assert exported("lean") == exported("sdk")


def test_a_span_that_has_ended_takes_nothing_more() -> None:
    spans = Spans()
    span = spans.tracer.start_span("one")
    span.end(5)
    span.end(6)
    span.set_attribute("a", 1)
    span.set_attributes({"b": 2})
    span.add_link(REMOTE)
    span.set_status(StatusCode.ERROR)
    (record,) = spans("one")
    assert (record.end_ns, record.attributes, record.links, record.is_error) == (5, {}, (), False)
    assert not span.is_recording()


def test_an_exception_in_a_span_is_an_error_without_its_message() -> None:
    exporter = InMemorySpanExporter()
    provider = make_provider("test")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.raises(ValueError), make_tracer(provider).start_as_current_span("one"):
        raise ValueError(SECRET)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.attributes for event in span.events] == [{"exception.type": "ValueError"}]
    assert SECRET not in str([event.attributes for event in span.events])
    assert span.status.description is None


def test_limits_of_the_standard_variables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    spans = Spans()
    links = [Link(SpanContext(number, number, False)) for number in range(1, 4)]
    spans.tracer.start_span("linked", links=links).end()
    assert [link.span_id for link in spans("linked")[0].links] == [f"{2:016x}", f"{3:016x}"]
    span = spans.tracer.start_span("one", attributes={"a": "long text", "b": "c", "d": "e"})
    for number in range(1, 4):
        span.add_link(SpanContext(number, number, False))
    span.end()
    (record,) = spans("one")
    assert record.attributes == {"b": "c", "d": "e"}
    assert [link.span_id for link in record.links] == [f"{2:016x}", f"{3:016x}"]


@pytest.mark.parametrize(("sampler", "is_sampled"), [("always_off", False), ("always_on", True)])
def test_the_sampler_of_the_environment_decides(
    sampler: str, is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    spans = Spans()
    with spans.tracer.start_as_current_span("outer") as outer:
        spans.tracer.start_span("inner").end()
    assert outer.get_span_context().trace_flags.sampled is is_sampled
    assert len(spans()) == (2 if is_sampled else 0)


async def test_spans_that_were_left_for_later_are_made_by_themselves() -> None:
    spans, made = Spans(), asyncio.Event()

    def make() -> None:
        spans.tracer.start_span("one").end()
        made.set()

    spans.tracer.later(make)
    spans.tracer.later(make)
    await made.wait()
    assert len(spans("one")) == 2


def test_a_callers_span_passes_a_hop_with_its_baggage_and_state() -> None:
    span = SpanContext(2**127 + 5, 2**63 + 1, False, TraceFlags(1), TraceState([("vendor", "x")]))
    token = contexts.attach(baggage.set_baggage("tenant", "blue"))
    try:
        request = RequestContext()
        set_caller(request, span)
    finally:
        contexts.detach(token)
    found = caller_of(RequestContext.FromString(request.SerializeToString()))
    assert found
    context, caller = found
    assert caller == SpanContext(span.trace_id, span.span_id, True, span.trace_flags, span.trace_state)
    assert dict(baggage.get_all(context)) == {"tenant": "blue"}


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_ids_pass_a_hop_as_they_are(trace_id: int, span_id: int, flags: int) -> None:
    request = RequestContext()
    set_caller(request, SpanContext(trace_id, span_id, False, TraceFlags(flags)))
    assert not request.span.headers
    found = caller_of(request)
    assert found
    assert found[1] == SpanContext(trace_id, span_id, True, TraceFlags(flags))


@given(
    st.binary(max_size=20), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.dictionaries(st.text(), st.text())
)
def test_whatever_a_request_names_as_its_caller_does_no_harm(
    trace_id: bytes, span_id: int, flags: int, headers: dict[str, str]
) -> None:
    span = CallerSpan(trace_id=trace_id, span_id=span_id, trace_flags=flags, headers=headers)
    found = caller_of(RequestContext(span=span))
    assert (found is not None) == (len(trace_id) == 16 and any(trace_id) and span_id != 0)
