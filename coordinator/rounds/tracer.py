"""A span for each round that serves a traced request, linked to the spans of these requests and they to it.

A round serves many requests, so its span is the child of none but the root of a trace of its own (OpenTelemetry: links
stand for batches). It exists when any member's request is sampled; `observe.spans.sampler` makes the SDK agree. Its
attributes are noted while the round runs and written later: see `LeanTracer.later`.

Values of single members stand in lists, `paceline.request.*`, in the order of the links. Attributes of the links
themselves would cost three times as much, because the SDK makes an object of each.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from coordinator.requests.generation import Generation
from coordinator.requests.traced_request import TracedRequest
from coordinator.rounds.round import RoundReport
from paceline.errors import PacelineError
from paceline.types import HopTime, Usage

if TYPE_CHECKING:
    from paceline.observe.spans.lean import LeanTracer

Record = Callable[[RoundReport], None]
Attributes = dict[str, AttributeValue]
MakeAttributes = Callable[[], Attributes]


class RoundTracer:
    def __init__(self, tracer: "LeanTracer | None", policy: str) -> None:
        """Without a tracer nothing is recorded."""
        self._tracer = tracer
        self._policy = policy

    @contextmanager
    def round(
        self, group: Sequence[Generation], waits_s: Sequence[float], draft_counts: Sequence[int], lane: int
    ) -> Iterator[Record]:
        """Trace the round that the block runs. The block must call the yielded function with its report.

        `waits_s` has the seconds that each generation waited to be grouped.
        """
        members = [one for one in group if one.request.traced]
        if not self._tracer or not members:
            yield _ignore
            return
        traces = [one.request.traced for one in group if one.request.traced]
        waited_s = [wait_s for one, wait_s in zip(group, waits_s, strict=True) if one.request.traced]
        span = self._tracer.start_span(
            "round", Context(), links=[one.link for one in traces], attributes=_waits(members, waited_s)
        )
        before = [one.usage for one in members]
        told = [partial(self._asked, len(group), draft_counts, lane)]

        def record(report: RoundReport) -> None:
            told.append(partial(_outcome, report))
            told.append(partial(_gains, before, [one.usage for one in members]))
            for one in traces:
                one.note(span.get_span_context())

        token = contexts.attach(trace.set_span_in_context(span, _shared_baggage(traces)))
        try:
            yield record
        except BaseException as error:  # also a cancellation: the target was lost
            # The type only: a message may quote a request.
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", error.reason if isinstance(error, PacelineError) else type(error).__name__)
            raise
        finally:
            contexts.detach(token)
            self._tracer.later(partial(_end, span, told, time.time_ns()))

    def _asked(self, group_size: int, draft_counts: Sequence[int], lane: int) -> Attributes:
        return {
            "paceline.group_size": group_size,
            "paceline.draft_count": max(draft_counts),
            "paceline.lane": lane,
            "paceline.policy": self._policy,
        }


def _waits(members: Sequence[Generation], waited_s: Sequence[float]) -> Attributes:
    """Return the waits of each member, and which output of its request it is if any is not the first."""
    attributes: Attributes = {"paceline.request.waited_s": waited_s}
    if any(one.queued_s for one in members):
        attributes["paceline.request.queued_s"] = [one.queued_s for one in members]
    if any(one.completion_index for one in members):
        attributes["paceline.request.completion_index"] = [one.completion_index for one in members]
    return attributes


def _ignore(report: RoundReport) -> None:
    pass


def _end(span: Span, told: Iterable[MakeAttributes], ended_ns: int) -> None:
    for make_attributes in told:
        span.set_attributes(make_attributes())
    span.end(ended_ns)


def _outcome(report: RoundReport) -> Attributes:
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


def _gains(before: Sequence[Usage], after: Sequence[Usage]) -> Attributes:
    """Return the tokens that the round brought each member."""
    pairs = list(zip(before, after, strict=True))
    return {
        "paceline.request.drafted_count": [new.drafted_count - old.drafted_count for old, new in pairs],
        "paceline.request.accepted_count": [new.accepted_count - old.accepted_count for old, new in pairs],
        "paceline.request.committed_count": [new.output_count - old.output_count for old, new in pairs],
    }


def _shared_baggage(members: Sequence[TracedRequest]) -> Context:
    """Return the baggage that the callers of all members sent alike: one call for all can carry no other."""
    context = Context()
    for name, value in frozenset.intersection(*(one.baggage for one in members)):
        context = baggage.set_baggage(name, value, context)
    return context
