"""Sampling of spans that link to others instead of having a parent.

A round serves many requests, so it is the root of a separate trace. Sampling it independently would lose most rounds of
a sampled request. It links to its sampled requests, and a root span that links to a sampled span is sampled. So is a
span inside a sampled one of this process. The sampler of `OTEL_TRACES_SAMPLER` decides all other cases.
"""

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class LinkedSampler(Sampler):
    def __init__(self, otherwise: Sampler) -> None:
        self._otherwise = otherwise

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            follows = parent.trace_flags.sampled and not parent.is_remote
        else:
            follows = any(link.context.trace_flags.sampled for link in links or ())
        if follows:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._otherwise.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Linked({self._otherwise.get_description()})"
