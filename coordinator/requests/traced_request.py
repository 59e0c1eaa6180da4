"""The tracing data of a request: what its rounds need, looked up once, and the spans of its rounds.

Rounds must lose little time between passes of the models, so nothing asks OpenTelemetry while they run.
"""

from dataclasses import dataclass, field
from typing import Self

from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext


@dataclass(frozen=True)
class TracedRequest:
    span: Span
    """The request's span."""
    link: Link
    """A link to that span."""
    baggage: frozenset[tuple[str, object]]
    """Baggage that its caller sent."""
    rounds: list[SpanContext] = field(default_factory=list)
    """Spans of the rounds that brought it forward; the request's span links them when it ends."""

    def note(self, round_span: SpanContext) -> None:
        """Note the span of a round that brought one of its outputs forward, once a round."""
        if not self.rounds or self.rounds[-1] is not round_span:
            self.rounds.append(round_span)

    @classmethod
    def of(cls, context: Context) -> Self:
        span = trace.get_current_span(context)
        return cls(span, Link(span.get_span_context()), frozenset(baggage.get_all(context).items()))
