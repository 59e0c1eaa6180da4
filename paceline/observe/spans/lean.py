"""Spans for the SDK's exporters at a fifth of the cost of the SDK's own.

An SDK span takes 13 us, and several times that between model passes that empty the caches, because it locks and copies
for any writer in any thread. These spans are written only by this project and by one thread. Sampler, ids and resource
stay the SDK's; a span inside one of the same service is not sampled anew. Processors hear only of a span's end, which
is all that exporting ones need.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.trace.sampling import Decision, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util._decorator import _agnosticcontextmanager
from opentelemetry.util.types import Attributes, AttributeValue

LATER_S = 0.5


class LeanTracer(Tracer):
    def __init__(self, provider: sdk.TracerProvider, name: str, limits: sdk.SpanLimits) -> None:
        """`limits` bound a span's attributes and links; events are unbounded."""
        sdk_tracer = provider.get_tracer(name)
        assert isinstance(sdk_tracer, sdk.Tracer)
        self._sdk = sdk_tracer
        self._ids = sdk_tracer.id_generator
        self._scope = InstrumentationScope(name)
        self._limits = limits
        self._later: list[Callable[[], None]] = []
        self._random_flag = TraceFlags.RANDOM_TRACE_ID if self._ids.is_trace_id_random() else 0

    def later(self, make: Callable[[], None]) -> None:
        """Defer the making of spans: every half second the event loop makes all that have gathered.

        Between two passes of a model the CPU caches hold none of the code that makes spans. Making them would take five
        to ten times as long, and the model's thread would wait for the interpreter.
        """
        self._later.append(make)
        if len(self._later) == 1:
            asyncio.get_running_loop().call_later(LATER_S, self.flush)

    def flush(self) -> None:
        """Make the deferred spans."""
        waiting, self._later = self._later, []
        for make in waiting:
            make()

    def new_span_id(self) -> int:
        return self._ids.generate_span_id()

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        *,
        span_id: int | None = None,
    ) -> Span:
        """Start a span as the SDK does. `span_id` comes from `new_span_id` when it had to be known before."""
        around = trace.get_current_span(context)
        parent = around.get_span_context()
        span_id = span_id or self.new_span_id()
        if isinstance(around, LeanSpan):
            identity = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        else:
            identity, sampled = self._sample(parent, span_id, context, name, kind, attributes, links)
            if sampled.decision is Decision.DROP:
                return trace.NonRecordingSpan(identity)
            attributes = sampled.attributes
        return LeanSpan(
            self._sdk.span_processor,
            self._limits,
            name,
            identity,
            parent if parent.is_valid else None,
            self._sdk.resource,
            dict(attributes or {}),
            links=deque(links, self._limits.max_links) if links else (),
            kind=kind,
            start_time=start_time or time.time_ns(),
            instrumentation_scope=self._scope,
        )

    def _sample(
        self, parent: SpanContext, span_id: int, context: Context | None, name: str, kind: SpanKind, *more: Any
    ) -> tuple[SpanContext, SamplingResult]:
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        random_flag = parent.trace_flags & TraceFlags.RANDOM_TRACE_ID if parent.is_valid else self._random_flag
        sampled = self._sdk.sampler.should_sample(context, trace_id, name, kind, *more)
        sampled_flag = TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else 0
        flags = TraceFlags(sampled_flag | random_flag)
        return SpanContext(trace_id, span_id, False, flags, sampled.trace_state), sampled

    @_agnosticcontextmanager
    def start_as_current_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> Iterator[Span]:
        span = self.start_span(name, context, kind, attributes, links, start_time)
        with trace.use_span(span, end_on_exit, record_exception, set_status_on_exception):
            yield span


class LeanSpan(sdk.ReadableSpan, Span):
    """A span that exporters read directly, so it cannot change after its end."""

    _attributes: Any
    _links: Any
    _events: Sequence[sdk.Event]

    def __init__(self, processor: sdk.SpanProcessor, limits: sdk.SpanLimits, *known: Any, **more: Any) -> None:
        """`known` and `more` are the arguments of `ReadableSpan`."""
        super().__init__(*known, **more)
        self._processor = processor
        self._limits = limits

    def get_span_context(self) -> SpanContext:
        assert self._context
        return self._context

    def is_recording(self) -> bool:
        return self._end_time is None

    def end(self, end_time: int | None = None) -> None:
        if self.is_recording():
            self._end_time = end_time or time.time_ns()
            self._bound_attributes()
            self._processor.on_end(self)

    def _bound_attributes(self) -> None:
        limit, length = self._limits.max_span_attributes, self._limits.max_span_attribute_length
        if length is not None or (limit is not None and len(self._attributes) > limit):
            self._attributes = BoundedAttributes(limit, self._attributes, max_value_len=length)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        if self.is_recording():
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        if self.is_recording():
            self._attributes.update(attributes)

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        if self.is_recording():
            if not isinstance(self._links, deque):
                self._links = deque(self._links, self._limits.max_links)
            self._links.append(Link(context, attributes))

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self.is_recording():
            self._events = (*self._events, sdk.Event(name, attributes, timestamp))

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        # Only the type, because a message may quote a request.
        self.add_event("exception", {"exception.type": type(exception).__qualname__, **(attributes or {})}, timestamp)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self.is_recording():
            # Only the code, because a description may quote a request.
            self._status = Status(status.status_code if isinstance(status, Status) else status)

    def update_name(self, name: str) -> None:
        if self.is_recording():
            self._name = name
