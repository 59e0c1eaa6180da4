"""Traces rounds: notes each one for the requests that it served, and gives some of them spans of their own.

A round serves many requests, so its own span, `shared_round`, is the child of none but the root of a trace of its own,
linked to their spans (OpenTelemetry: links stand for batches). It tells no more of a request than the request's own
trace does, but holds the services' side of the round. Any sampled request of a group would have its rounds sampled, so
their rate is capped.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Self

from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from coordinator.requests.generation import Generation
from coordinator.requests.traced_request import OwnRound, RoundNote, TracedRequest, counts_by_source
from coordinator.rounds.round_report import RoundReport, RowReport
from paceline.checks import DECODED_TOKENS
from paceline.errors import PacelineError
from paceline.types import HopTime, SourceUsage

Record = Callable[[RoundReport], None]

SHARED_PER_S = 2.0
"""Shared rounds a second that get spans, for as long as it goes on: each has nine in all, at 0.1 ms or more."""
SHARED_AT_ONCE = 32
"""Shared rounds that get spans after a pause: those of a short request, all of them."""


class RoundCap:
    """Lets through `SHARED_AT_ONCE` rounds after a pause, and `SHARED_PER_S` on average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(SHARED_AT_ONCE)
        self._asked_s = clock()

    def lets_through(self) -> bool:
        now_s = self._clock()
        self._left = min(SHARED_AT_ONCE, self._left + SHARED_PER_S * (now_s - self._asked_s))
        self._asked_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RoundTracer:
    def __init__(self, tracer: Tracer | None, policy: str, cap: RoundCap | None = None) -> None:
        """Without a tracer nothing is recorded."""
        self._tracer = tracer
        self._policy = policy
        self._cap = cap or RoundCap()

    def round(
        self, group: Sequence[Generation], waits_s: Sequence[float], draft_counts: Sequence[int], lane: int
    ) -> AbstractContextManager[Record]:
        """Trace the round that the block runs. The block must call the yielded function with its report.

        `waits_s` has the seconds that each generation waited to be grouped.
        """
        traced = [pair for pair in zip(group, waits_s, strict=True) if pair[0].request.traced]
        if not self._tracer or not traced:
            return _UNTRACED
        return self._traced(self._tracer, [_Member.of(*pair) for pair in traced], draft_counts, lane)

    @contextmanager
    def _traced(
        self, tracer: Tracer, members: Sequence["_Member"], draft_counts: Sequence[int], lane: int
    ) -> Iterator[Record]:
        error, reports = "", list[RoundReport]()
        traces = list({id(one.traced): one.traced for one in members}.values())
        began_ns = time.time_ns()
        span = self._shared(tracer, traces, draft_counts, lane) if self._cap.lets_through() else None
        context = span.get_span_context() if span else None
        begun = RoundNote(began_ns, 0, len(draft_counts), HopTime(), HopTime(), context, "")
        for one in members:
            one.begin(begun)
        try:
            with _within(span, traces) if span else nullcontext():
                yield reports.append
        except BaseException as caught:  # also a cancellation: the target was lost
            # The type only: a message may quote a request.
            error = caught.reason if isinstance(caught, PacelineError) else type(caught).__name__
            raise
        finally:
            hops = (reports[0].propose, reports[0].verify) if reports else (HopTime(), HopTime())
            note = RoundNote(began_ns, time.time_ns(), len(draft_counts), *hops, context, error)
            rounds = (reports[0].rows, *reports[0].further) if reports else ((),)
            _note(members, note, rounds)
            if span:
                _end(span, note, reports)

    def _shared(self, tracer: Tracer, traces: Sequence[TracedRequest], draft_counts: Sequence[int], lane: int) -> Span:
        attributes: dict[str, AttributeValue] = {
            "paceline.group_size": len(draft_counts),
            "paceline.draft_count": max(draft_counts),
            "paceline.lane": lane,
            "paceline.policy": self._policy,
        }
        return tracer.start_span("shared_round", Context(), attributes=attributes, links=[one.link for one in traces])


def _note(members: Sequence["_Member"], note: RoundNote, rounds: Sequence[Sequence[RowReport]]) -> None:
    """Note a round, and the further ones of its call, which take no time beside the first one's."""
    for place, rows in enumerate(rounds):
        own = {row.generation: row for row in rows}
        if place:
            note = replace(note, began_ns=note.ended_ns, group_size=len(rows), propose=HopTime(), verify=HopTime())
        for one in members:
            if not place or one.generation in own:
                one.note(note, own.get(one.generation), is_further=place > 0)


@dataclass(frozen=True)
class _Member:
    """A traced generation of the group, as it was before the round."""

    generation: Generation
    traced: TracedRequest
    waited_s: float
    queued_s: float
    is_prefill: bool

    @classmethod
    def of(cls, one: Generation, waited_s: float) -> Self:
        assert one.request.traced
        is_prefill = not one.target_cached_length or one.target_lack > DECODED_TOKENS
        return cls(one, one.request.traced, waited_s, one.queued_s, is_prefill)

    def begin(self, note: RoundNote) -> None:
        """Note that a round begins."""
        self.traced.begin(self._own(note, None, is_further=False))

    def note(self, note: RoundNote, row: RowReport | None, *, is_further: bool) -> None:
        """Note a round that brought `row`; None if it brought nothing."""
        self.traced.note(self._own(note, row.usage if row else None, is_further=is_further))

    def _own(self, note: RoundNote, source: SourceUsage | None, *, is_further: bool) -> OwnRound:
        return OwnRound(
            note,
            self.generation.completion_index,
            self.is_prefill and not is_further,
            0.0 if is_further else self.queued_s,
            0.0 if is_further else self.waited_s,
            source.drafted_count if source else 0,
            source.accepted_count if source else 0,
            source,
        )


def _ignore(report: RoundReport) -> None:
    pass


_UNTRACED = nullcontext(_ignore)


@contextmanager
def _within(span: Span, traces: Sequence[TracedRequest]) -> Iterator[None]:
    """Make the span the current one, with the baggage that the callers of all requests sent alike.

    One call for all can carry no other.
    """
    context = Context()
    for name, value in frozenset.intersection(*(one.baggage for one in traces)):
        context = baggage.set_baggage(name, value, context)
    token = contexts.attach(trace.set_span_in_context(span, context))
    try:
        yield
    finally:
        contexts.detach(token)


def _end(span: Span, note: RoundNote, reports: Sequence[RoundReport]) -> None:
    for report in reports:
        span.set_attributes(
            {
                "paceline.drafted_count": report.drafted_count,
                "paceline.accepted_count": sum(row.accepted_count for row in report.all_rows),
                "paceline.committed_count": sum(row.committed_count for row in report.all_rows),
                "paceline.prompt_token_count": report.prompt_token_count,
                **counts_by_source(report.sources),
            }
        )
        if report.further:
            span.set_attribute("paceline.further_round_count", len(report.further))
    if note.error:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", note.error)
    span.end(note.ended_ns)
