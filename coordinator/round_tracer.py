"""A span for each round that serves a traced request, linked to the requests it serves and they to it.

A round serves many requests, so it is the child of none but the root of a trace of its own (OpenTelemetry: links stand
for batches). It exists when any member's request is sampled; `paceline.tracing.sampling` makes the SDK agree. What
concerns one member stands in the links: what it waited in the round's link to it, what it gained in its link back.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Group
from contextlib import contextmanager

from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, StatusCode, Tracer

from coordinator.round import RoundReport
from coordinator.sequence import Sequence
from paceline.errors import PacelineError
from paceline.types import HopTime, Usage

Record = Callable[[RoundReport], None]


class RoundTracer:
    def __init__(self, tracer: Tracer | None, policy: str) -> None:
        """Without a tracer nothing is recorded."""
        self._tracer = tracer
        self._policy = policy

    @contextmanager
    def round(
        self, group: Group[Sequence], waits_s: Group[float], draft_counts: Group[int], lane: int
    ) -> Iterator[Record]:
        """Trace the round that the block runs, which is to hand its report to what this yields.

        `waits_s` is how long each sequence waited to be grouped.
        """
        members = {one: one.trace_context for one in group if one.trace_context}
        if not self._tracer or not members:
            yield _ignore
            return
        attributes: dict[str, int | str] = {
            "paceline.group_size": len(group),
            "paceline.draft_count": max(draft_counts),
            "paceline.lane": lane,
            "paceline.policy": self._policy,
        }
        links = [
            _link(sequence, sequence.trace_context, waited_s)
            for sequence, waited_s in zip(group, waits_s, strict=True)
            if sequence.trace_context
        ]
        span = self._tracer.start_span("round", Context(), links=links, attributes=attributes)
        before = {sequence: sequence.usage for sequence in members}

        def record(report: RoundReport) -> None:
            span.set_attributes(_outcome(report))
            for sequence, context in members.items():
                _link_back(span, sequence, before[sequence], context)

        token = contexts.attach(trace.set_span_in_context(span, _shared_baggage(list(members.values()))))
        try:
            yield record
        except BaseException as error:  # cancelled, too: the target was lost under it
            # The type only: a message may quote a request.
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", error.reason if isinstance(error, PacelineError) else type(error).__name__)
            raise
        finally:
            contexts.detach(token)
            span.end()


def _link(sequence: Sequence, context: Context, waited_s: float) -> Link:
    attributes = _output(sequence) | {"paceline.waited_s": waited_s}
    if sequence.queued_s:
        attributes["paceline.queued_s"] = sequence.queued_s
    return Link(trace.get_current_span(context).get_span_context(), attributes)


def _ignore(report: RoundReport) -> None:
    pass


def _outcome(report: RoundReport) -> dict[str, int | float]:
    return {
        "paceline.drafted_count": report.drafted_count,
        "paceline.accepted_count": sum(row.accepted_count for row in report.rows),
        "paceline.committed_count": sum(row.committed_count for row in report.rows),
        **_hop_attributes("draft", report.propose),
        **_hop_attributes("target", report.verify),
    }


def _hop_attributes(service: str, hop: HopTime) -> dict[str, float]:
    return {
        f"paceline.{service}.wire_s": hop.wire_s,
        f"paceline.{service}.queued_s": hop.queued_s,
        f"paceline.{service}.executed_s": hop.executed_s,
    }


def _link_back(span: Span, sequence: Sequence, before: Usage, context: Context) -> None:
    """Tell the request's span what the round brought it; one that ended meanwhile takes nothing more."""
    request = trace.get_current_span(context)
    if request.is_recording():
        after = sequence.usage
        attributes = _output(sequence) | {
            "paceline.drafted_count": after.drafted_count - before.drafted_count,
            "paceline.accepted_count": after.accepted_count - before.accepted_count,
            "paceline.committed_count": after.output_count - before.output_count,
        }
        request.add_link(span.get_span_context(), attributes)


def _output(sequence: Sequence) -> dict[str, int | float]:
    """Which output of its request a link is about, unless it is the first: most links cost no more than they must."""
    return {"paceline.completion_index": sequence.completion_index} if sequence.completion_index else {}


def _shared_baggage(members: Group[Context]) -> Context:
    """Baggage that all members' callers sent alike: of what they disagree on, a call for all can carry none."""
    shared = set(baggage.get_all(members[0]).items()).intersection(
        *(set(baggage.get_all(member).items()) for member in members[1:])
    )
    context = Context()
    for name, value in shared:
        context = baggage.set_baggage(name, value, context)
    return context
