"""The reported numbers of a load run, as pure functions of its records."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.measure.load.load import Outcome, SentRequest
from paceline.types import SourceUsage, added_up

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class Objectives:
    """Limits in seconds that a good request must keep; None means no limit."""

    first_token_s: float | None = None
    per_token_s: float | None = None

    @property
    def any(self) -> bool:
        return self.first_token_s is not None or self.per_token_s is not None

    def met_by(self, record: SentRequest) -> bool:
        return record.outcome is Outcome.COMPLETED and all(
            limit is None or value is None or value <= limit
            for limit, value in (
                (self.first_token_s, record.first_token_s),
                (self.per_token_s, record.per_token_s),
            )
        )


@dataclass(frozen=True)
class Percentiles:
    """Percentiles over completed requests, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LoadSummary:
    elapsed_s: float
    """Seconds from the start until the last request ended."""
    counts: dict[str, int]
    """Requests by outcome."""
    errors: dict[str, int]
    """Requests by the reason of their rejection or failure."""
    messages: dict[str, str]
    """By the reason, what the first of these said."""
    first_token_s: Percentiles | None
    """Percentiles here and below are None when no request has the figure."""
    per_token_s: Percentiles | None
    latency_s: Percentiles | None
    queued_s: Percentiles | None
    late_s: float
    """Longest delay between a planned arrival and its sending; if it is not small, the sender was the bottleneck."""
    requests_per_s: float
    """Completed requests a second."""
    tokens_per_s: float
    """Tokens a second of all outputs, unfinished ones included."""
    drafted_count: int
    accepted_count: int
    sources: tuple[SourceUsage, ...]
    """Drafted and accepted tokens by source."""
    good_count: int | None
    """Number of completed requests within the objectives; None without objectives."""

    @property
    def good_per_s(self) -> float | None:
        return None if self.good_count is None else _rate(self.good_count, self.elapsed_s)


def summarize(records: Sequence[SentRequest], objectives: Objectives) -> LoadSummary:
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    usages = [record.usage for record in completed if record.usage]
    elapsed_s = max((record.ended_s for record in records), default=0.0)
    return LoadSummary(
        elapsed_s=elapsed_s,
        counts={outcome.value: sum(record.outcome is outcome for record in records) for outcome in Outcome},
        errors=dict(Counter(record.error for record in records if record.error)),
        messages={record.error: record.message for record in reversed(records) if record.error},
        first_token_s=_percentiles(record.first_token_s for record in completed),
        per_token_s=_percentiles(record.per_token_s for record in completed),
        latency_s=_percentiles(record.latency_s for record in completed),
        queued_s=_percentiles(usage.queued_s for usage in usages),
        late_s=max((record.sent_s - record.planned_s for record in records), default=0.0),
        requests_per_s=_rate(len(completed), elapsed_s),
        tokens_per_s=_rate(sum(record.output_count for record in records), elapsed_s),
        drafted_count=sum(usage.drafted_count for usage in usages),
        accepted_count=sum(usage.accepted_count for usage in usages),
        sources=added_up(source for usage in usages for source in usage.sources),
        good_count=sum(map(objectives.met_by, completed)) if objectives.any else None,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that `percent` of the values do not exceed, interpolated between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return below + (above - below) * (rank - math.floor(rank))


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    known = [value for value in values if value is not None]
    return Percentiles(*(percentile(known, percent) for percent in PERCENTS)) if known else None


def _rate(count: float, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0
