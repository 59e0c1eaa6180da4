"""Analysis of where a request's time went, hop by hop, from spans.

Uses only a request's span and its children, which the coordinator made: their durations come from one clock. They
include the durations that a model service reported with its answers, so clocks of different machines are never
compared.

A request's latency is the time in the queue, plus for each round the wait since the one before and the round itself. A
round is both calls, each divided into wire, queue and execute, and the coordinator's own work between them.
The rest is `other`: reading the request and streaming the last tokens.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from paceline.observe.records import SpanRecord

CALL_HOPS = {"draft": "draft", "target": "verify"}
"""The services' names in span attributes, mapped to the names of their hops."""
PARTS = ("wire", "queue", "execute")
PART_WORDS = ("wire_s", "queued_s", "executed_s")
"""The parts' names in span attributes."""
OWN_SPANS = ("queue", "prefill", "round", "later_rounds")
ROUND_HOPS = (
    "queued",
    "waiting",
    "coordinator",
    *(f"{call} {part}" for call in CALL_HOPS.values() for part in PARTS),
)
HOPS = (*ROUND_HOPS, "other")
REMEDIES = {
    "queued": "more requests come than the pool has places for: raise --batch-size, or add a cluster",
    "waiting": "generations wait for a lane to come free: raise --batch-size or --lanes",
    "coordinator": "the coordinator's own work between the calls: give its process a core of its own",
    "draft wire": "the way to the draft service and back: bring it nearer, or give both processes a core",
    "draft queue": "the draft service is busy with other groups: add a replica, or give it more --threads",
    "draft execute": "the draft model's passes: a smaller draft, fewer --draft-count, or faster hardware",
    "verify wire": "the way to the target service and back: bring it nearer, or give both processes a core",
    "verify queue": "the target service is busy with other groups: add a replica",
    "verify execute": "the target model's passes: a better draft saves some, faster hardware shortens them",
    "other": "reading requests and streaming answers, or rounds whose spans were lost: look at the coordinator's load",
}


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of one source."""

    drafted_count: int
    accepted_count: int


@dataclass(frozen=True)
class RequestRound:
    """A round from the view of one of its requests, or the sum of a request's later rounds."""

    span: SpanRecord
    hops_s: Mapping[str, float]
    """Seconds by hop name, for all of `ROUND_HOPS`."""
    drafted_count: int
    accepted_count: int
    sources: Mapping[str, Drafts]
    """Its draft tokens by source."""
    round_count: int = 1

    @property
    def total_s(self) -> float:
        return sum(self.hops_s.values())


@dataclass(frozen=True)
class RequestTrace:
    span: SpanRecord
    rounds: tuple[RequestRound, ...]
    """In order of time; for a request with several outputs, the rounds of the output that ended last. Of very many
    rounds, the later ones are one."""
    sources: Mapping[str, Drafts]
    """Draft tokens by source, of the rounds of all outputs."""

    @property
    def latency_s(self) -> float:
        return self.span.duration_s

    @property
    def is_answered(self) -> bool:
        return self.span.attributes.get("rpc.response.status_code") == "OK"

    @cached_property
    def hops_s(self) -> dict[str, float]:
        """Seconds by hop name, for all of `HOPS`; they add up to the latency."""
        sums = {hop: sum(one.hops_s[hop] for one in self.rounds) for hop in ROUND_HOPS}
        return sums | {"other": self.latency_s - sum(sums.values())}


@dataclass(frozen=True)
class HopSummary:
    hop: str
    p50_s: float
    p90_s: float
    p99_s: float
    """Percentiles in seconds over the rounds of all requests that are told one by one; for `other`, over the
    requests."""
    share: float
    """Share of the requests' latency, 0 to 1."""


def requests_of(spans: Iterable[SpanRecord]) -> list[RequestTrace]:
    """Return the requests with their rounds, ordered by start. Spans may come in any order and from any service."""
    spans = list(spans)
    rounds: defaultdict[tuple[str, str | None], list[SpanRecord]] = defaultdict(list)
    for span in spans:
        if span.name in OWN_SPANS:
            rounds[span.trace_id, span.parent_id].append(span)
    requests = [span for span in spans if span.name == "generate" and span.kind == "server"]
    own = ((span, rounds[span.trace_id, span.span_id]) for span in requests)
    found = [RequestTrace(span, _rounds(children), _added_up(map(_sources, children))) for span, children in own]
    return sorted(found, key=lambda one: one.span.start_ns)


def _rounds(spans: Iterable[SpanRecord]) -> tuple[RequestRound, ...]:
    by_output: defaultdict[int, list[SpanRecord]] = defaultdict(list)
    for span in spans:
        by_output[span.attributes.get("paceline.completion_index", 0)].append(span)
    if not by_output:
        return ()
    last = max(by_output.values(), key=lambda rounds: max(one.end_ns for one in rounds))
    return tuple(_in_turn(sorted(last, key=lambda one: (one.start_ns, one.end_ns))))


def _in_turn(spans: Iterable[SpanRecord]) -> Iterator[RequestRound]:
    """Yield the rounds of one output with the time before each: what is not in a `queue` was a wait between rounds."""
    queued_s, waited_s, ended_ns = 0.0, 0.0, None
    for span in spans:
        waited_s += 0.0 if ended_ns is None else (span.start_ns - ended_ns) / 1e9
        ended_ns = span.end_ns
        if span.name == "queue":
            queued_s += span.duration_s
            continue
        yield _round(span, queued_s, waited_s)
        queued_s = waited_s = 0.0


def _round(span: SpanRecord, queued_s: float, waited_s: float) -> RequestRound:
    def told(name: str) -> float:
        return float(span.attributes.get(f"paceline.{name}", 0.0))

    hops = {"queued": queued_s, "waiting": waited_s}
    for service, name in CALL_HOPS.items():
        hops |= {f"{name} {part}": told(f"{service}.{word}") for part, word in zip(PARTS, PART_WORDS, strict=True)}
    calls_s = sum(hops[f"{name} {part}"] for name in CALL_HOPS.values() for part in PARTS)
    own_s = span.duration_s - calls_s
    if span.is_error or span.attributes.get("paceline.is_cut_off"):
        # Only a failed verify fails a round, and one that outlasts its request waits for that. No more is known of it.
        hops["verify wire"], own_s = span.duration_s, 0.0
    if span.name == "later_rounds":
        # It lasts longer than its rounds: there are waits between them, the first of which comes before it.
        own_s = told("coordinator_s")
        hops |= {"queued": told("queued_s"), "waiting": told("waited_s")}
        hops["verify wire"] += told("failed_s")
    every_hop = {hop: hops.get(hop, own_s) for hop in ROUND_HOPS}
    drafts = _drafts(span, "paceline")
    counts = drafts.drafted_count, drafts.accepted_count
    return RequestRound(span, every_hop, *counts, _sources(span), int(told("round_count")) or 1)


def _sources(span: SpanRecord) -> dict[str, Drafts]:
    """Return draft tokens by source: of the one that the span names, or the sums of the span's rounds."""
    if source := span.attributes.get("paceline.draft_source"):
        return {str(source): _drafts(span, "paceline")}
    found = (re.fullmatch(r"paceline\.(\w+)\.drafted_count", name) for name in span.attributes)
    return {one[1]: _drafts(span, f"paceline.{one[1]}") for one in found if one}


def _drafts(span: SpanRecord, prefix: str) -> Drafts:
    drafted, accepted = (int(span.attributes.get(f"{prefix}.{name}_count", 0)) for name in ("drafted", "accepted"))
    return Drafts(drafted, accepted)


def _added_up(counts: Iterable[Mapping[str, Drafts]]) -> dict[str, Drafts]:
    """Add up the draft tokens by source, in the order of the sources' names."""
    sums: dict[str, Drafts] = {}
    for source, own in (item for one in counts for item in one.items()):
        before = sums.get(source, Drafts(0, 0))
        sums[source] = Drafts(before.drafted_count + own.drafted_count, before.accepted_count + own.accepted_count)
    return dict(sorted(sums.items()))


def summarize(requests: Sequence[RequestTrace]) -> list[HopSummary]:
    """Summarize each hop over one or more requests, in the order of `HOPS`."""
    latency_s = sum(one.latency_s for one in requests)
    # A further round has no time of its own.
    rounds = [one for request in requests for one in request.rounds if one.round_count == 1 and one.span.duration_s > 0]
    summaries = []
    for hop in HOPS:
        own = [one.hops_s[hop] for one in (requests if hop == "other" else rounds)] or [0.0]
        share = sum(request.hops_s[hop] for request in requests) / max(latency_s, 1e-9)
        summaries.append(HopSummary(hop, nearest_rank(own, 50), nearest_rank(own, 90), nearest_rank(own, 99), share))
    return summaries


def drafts_by_source(requests: Iterable[RequestTrace]) -> dict[str, Drafts]:
    """Add up the draft tokens of the requests by source, in the order of the sources' names."""
    return _added_up(one.sources for one in requests)


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def verdict(requests: Sequence[RequestTrace]) -> str:
    """Return one sentence that names the hop to fix first."""
    worst = max(summarize(requests), key=lambda one: one.share)
    mean_ms = 1e3 * fmean(one.latency_s for one in requests)
    return (
        f"Fix {worst.hop} first: {worst.share:.0%} of the latency, {worst.share * mean_ms:.0f} of the {mean_ms:.0f} ms "
        f"of a request on average; {REMEDIES[worst.hop]}."
    )
