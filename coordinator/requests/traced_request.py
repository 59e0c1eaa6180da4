"""The tracing data of a request: what its rounds need, looked up once, and what they note for its trace.

Rounds must lose little time between passes of the models, so nothing asks OpenTelemetry while they run: spans are made
from these notes when the request ends. Owns the notes and their limit; knows nothing of spans but contexts.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext

from paceline.types import HopTime, SourceUsage

MAX_ROUNDS = 256
"""Rounds of a request that are noted one by one; what comes after them is summed up."""


@dataclass(frozen=True, slots=True)
class RoundNote:
    """A round, as all its requests saw it. Times are Unix times in ns."""

    began_ns: int
    ended_ns: int
    """0 while it runs."""
    group_size: int
    propose: HopTime
    verify: HopTime
    span: SpanContext | None
    """The span that the requests of the round share; None: it has none."""
    error: str
    """Type of the error that ended it; empty without one."""
    is_cut_off: bool = False
    """Whether it went on when the request ended."""


@dataclass(frozen=True, slots=True)
class OwnRound:
    """A round and what it was to one of its requests' outputs."""

    round: RoundNote
    completion_index: int
    is_prefill: bool
    """Whether the target had to take in a prompt, or what it lost of one, before it could decode."""
    queued_s: float
    waited_s: float
    """Seconds since its last round, or since it got a place after `queued_s`."""
    drafted_count: int
    accepted_count: int
    source: SourceUsage | None = None
    """What drafted for it, with the same counts; None: nothing did."""

    def told(self) -> dict[str, float]:
        """Return the attributes of its span that can be added up over rounds; zeros are left out."""
        propose, verify = self.round.propose, self.round.verify
        attributes = {
            "paceline.draft.wire_s": propose.wire_s,
            "paceline.draft.queued_s": propose.queued_s,
            "paceline.draft.executed_s": propose.executed_s,
            "paceline.target.wire_s": verify.wire_s,
            "paceline.target.queued_s": verify.queued_s,
            "paceline.target.executed_s": verify.executed_s,
            "paceline.drafted_count": self.drafted_count,
            "paceline.accepted_count": self.accepted_count,
        }
        return {name: value for name, value in attributes.items() if value}

    @property
    def drafted_by(self) -> dict[str, str]:
        """The attributes of its span that name what drafted."""
        if self.source is None:
            return {}
        model = {"paceline.draft_model": self.source.model} if self.source.model else {}
        return {"paceline.draft_source": self.source.source.value, **model}


def counts_by_source(usages: Iterable[SourceUsage]) -> dict[str, int]:
    """Return the attributes that tell draft tokens by source, of all draft models together."""
    counts: defaultdict[str, int] = defaultdict(int)
    for one in usages:
        counts[f"paceline.{one.source.value}.drafted_count"] += one.drafted_count
        counts[f"paceline.{one.source.value}.accepted_count"] += one.accepted_count
    return counts


@dataclass
class LaterRounds:
    """The sum of an output's rounds past `MAX_ROUNDS`."""

    began_ns: int
    ended_ns: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(int))
    """By attribute; counts stay integers."""

    def add(self, one: OwnRound) -> None:
        self.ended_ns = max(self.ended_ns, one.round.ended_ns)
        waits = {"paceline.waited_s": one.waited_s, "paceline.queued_s": one.queued_s}
        duration_s = (one.round.ended_ns - one.round.began_ns) / 1e9
        if one.round.error:  # how its time was shared among the hops is not known
            more = {"paceline.failed_round_count": 1, "paceline.failed_s": duration_s}
        else:
            more = {"paceline.coordinator_s": duration_s - one.round.propose.total_s - one.round.verify.total_s}
        by_source = counts_by_source([one.source] if one.source else [])
        for name, value in (one.told() | by_source | waits | more | {"paceline.round_count": 1}).items():
            self.sums[name] += value


@dataclass
class TracedRequest:
    span: Span
    """The request's span."""
    link: Link
    """A link to that span."""
    baggage: frozenset[tuple[str, object]]
    """Baggage that its caller sent."""
    queued_ns: int = 0
    """Unix time in ns of its queueing; 0 before."""
    rounds: list[OwnRound] = field(default_factory=list)
    later: dict[int, LaterRounds] = field(default_factory=dict)
    """By completion index."""
    running: dict[int, OwnRound] = field(default_factory=dict)
    """Rounds that have begun and not ended, by completion index."""

    def begin(self, one: OwnRound) -> None:
        """Note that a round for one of its outputs runs."""
        self.running[one.completion_index] = one

    def note(self, one: OwnRound) -> None:
        """Note a round that served one of its outputs."""
        self.running.pop(one.completion_index, None)
        if len(self.rounds) < MAX_ROUNDS:
            self.rounds.append(one)
        else:
            self.later.setdefault(one.completion_index, LaterRounds(one.round.began_ns)).add(one)

    @classmethod
    def of(cls, context: Context) -> Self:
        span = trace.get_current_span(context)
        return cls(span, Link(span.get_span_context()), frozenset(baggage.get_all(context).items()))
