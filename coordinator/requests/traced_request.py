"""What a round needs to know of a traced request, found out once, and the request of its rounds.

Between passes of the models little costs much, so neither asks OpenTelemetry for anything while rounds run.
"""

from dataclasses import dataclass, field
from typing import Self

from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext


@dataclass(frozen=True)
class TracedRequest:
    span: Span
    """The request's."""
    link: Link
    """To that."""
    baggage: frozenset[tuple[str, object]]
    """What its caller sent along."""
    rounds: list[SpanContext] = field(default_factory=list)
    """Spans of the rounds that brought it forward; the request's span links them when it ends."""

    def note(self, round_span: SpanContext) -> None:
        """A round brought one of its outputs forward; of several in one round the first notes it."""
        if not self.rounds or self.rounds[-1] is not round_span:
            self.rounds.append(round_span)

    @classmethod
    def of(cls, context: Context) -> Self:
        span = trace.get_current_span(context)
        return cls(span, Link(span.get_span_context()), frozenset(baggage.get_all(context).items()))
