"""A span for each round that serves a traced request, linked to the requests it serves and they to it.

A round serves many requests, so it is the child of none but the root of a trace of its own (OpenTelemetry: links stand
for batches). It exists when any member's request is sampled; `paceline.tracing.sampling` makes the SDK agree.

What concerns one member stands in lists, `paceline.request.*`, in the order of the links. Attributes of the links
themselves would cost three times as much: the SDK makes an object of each link's.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Group
from contextlib import contextmanager

from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import Link, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

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
        members = [one for one in group if one.trace_context]
        if not self._tracer or not members:
            yield _ignore
            return
        attributes = {
            "paceline.group_size": len(group),
            "paceline.draft_count": max(draft_counts),
            "paceline.lane": lane,
            "paceline.policy": self._policy,
            **_waits(members, [wait_s for one, wait_s in zip(group, waits_s, strict=True) if one.trace_context]),
        }
        links = [Link(trace.get_current_span(one.trace_context).get_span_context()) for one in members]
        span = self._tracer.start_span("round", Context(), links=links, attributes=attributes)
        before = [one.usage for one in members]

        def record(report: RoundReport) -> None:
            span.set_attributes(_outcome(report) | _gains(before, [one.usage for one in members]))
            for one in members:
                request = trace.get_current_span(one.trace_context)
                if request.is_recording():  # one that ended meanwhile takes nothing more
                    request.add_link(span.get_span_context())

        shared = _shared_baggage([one.trace_context or Context() for one in members])
        token = contexts.attach(trace.set_span_in_context(span, shared))
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


def _waits(members: Group[Sequence], waits_s: Group[float]) -> dict[str, AttributeValue]:
    """What each member waited for, and which output of its request it is, where that is not the first."""
    attributes: dict[str, AttributeValue] = {"paceline.request.waited_s": waits_s}
    if any(one.queued_s for one in members):
        attributes["paceline.request.queued_s"] = [one.queued_s for one in members]
    if any(one.completion_index for one in members):
        attributes["paceline.request.completion_index"] = [one.completion_index for one in members]
    return attributes


def _ignore(report: RoundReport) -> None:
    pass


def _outcome(report: RoundReport) -> dict[str, AttributeValue]:
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


def _gains(before: Group[Usage], after: Group[Usage]) -> dict[str, AttributeValue]:
    """What the round brought each member."""
    pairs = list(zip(before, after, strict=True))
    return {
        "paceline.request.drafted_count": [new.drafted_count - old.drafted_count for old, new in pairs],
        "paceline.request.accepted_count": [new.accepted_count - old.accepted_count for old, new in pairs],
        "paceline.request.committed_count": [new.output_count - old.output_count for old, new in pairs],
    }


def _shared_baggage(members: Group[Context]) -> Context:
    """Baggage that all members' callers sent alike: of what they disagree on, a call for all can carry none."""
    shared = set(baggage.get_all(members[0]).items()).intersection(
        *(set(baggage.get_all(member).items()) for member in members[1:])
    )
    context = Context()
    for name, value in shared:
        context = baggage.set_baggage(name, value, context)
    return context
