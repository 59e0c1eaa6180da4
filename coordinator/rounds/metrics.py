"""Metrics of rounds, counted as they end. `docs/metrics.md` says what the numbers mean."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from coordinator.rounds.round_report import RoundReport
from paceline.observe.metrics import ROUND_BUCKETS_S, ROW_BUCKETS, Exemplar, active_exemplar
from paceline.types import HopTime


class RoundMetrics:
    """Times and sizes of rounds."""

    def __init__(self, registry: CollectorRegistry, exemplar: Callable[[], Exemplar] = active_exemplar) -> None:
        self._exemplar = exemplar
        self._duration = Histogram(
            "paceline_round_duration_seconds",
            "Time of a round: propose, verify, commit.",
            buckets=ROUND_BUCKETS_S,
            registry=registry,
        )
        hops = Histogram(
            "paceline_hop_seconds",
            "Time a round spent in a part of a hop; those of all hops make up the round.",
            ["hop", "part"],
            buckets=ROUND_BUCKETS_S,
            registry=registry,
        )
        self._draft = _HopHistograms(hops, "draft")
        self._verify = _HopHistograms(hops, "verify")
        self._own = hops.labels("coordinator", "execute")
        self._group_size = Histogram(
            "paceline_group_size", "Generations in a round.", buckets=ROW_BUCKETS, registry=registry
        )
        self._wait = Histogram(
            "paceline_group_wait_seconds",
            "Time a live generation waited to be grouped, each round.",
            buckets=ROUND_BUCKETS_S,
            registry=registry,
        )
        self._drafts = Counter("paceline_drafts", "Drafts verified: one a generation and round.", registry=registry)
        self._further = Counter(
            "paceline_further_rounds",
            "Rounds that the target ran by itself, in the call of the round before.",
            registry=registry,
        )
        self._draft_failures = Counter(
            "paceline_draft_failures", "Rounds whose call to the draft service failed.", registry=registry
        )
        self._failed = Counter("paceline_rounds_failed", "Rounds that failed their whole group.", registry=registry)

    def round_failed(self, waits_s: Sequence[float]) -> None:
        """Count a round that failed its whole group."""
        self._group_taken(waits_s)
        self._failed.inc()

    def round_cut_off(self, waits_s: Sequence[float]) -> None:
        """Count a round that ended with its requests' time: it says nothing of the target."""
        self._group_taken(waits_s)

    def round_ended(self, waits_s: Sequence[float], report: RoundReport) -> None:
        """Count a round; `waits_s` has the seconds that each generation waited for it."""
        self._group_taken(waits_s)
        exemplar = self._exemplar()
        self._duration.observe(report.duration_s, exemplar)
        if report.propose.total_s:
            self._draft.observe(report.propose, exemplar)
        self._verify.observe(report.verify, exemplar)
        self._own.observe(max(0.0, report.duration_s - report.propose.total_s - report.verify.total_s), exemplar)
        self._drafts.inc(sum(row.drafted_count > 0 for row in report.all_rows))
        self._further.inc(len(report.further))
        if report.draft_error:
            self._draft_failures.inc()

    def _group_taken(self, waits_s: Sequence[float]) -> None:
        self._group_size.observe(len(waits_s))
        for wait_s in waits_s:
            self._wait.observe(wait_s)


class _HopHistograms:
    def __init__(self, hops: Histogram, hop: str) -> None:
        self._wire, self._queue, self._execute = (hops.labels(hop, part) for part in ("wire", "queue", "execute"))

    def observe(self, time: HopTime, exemplar: Exemplar) -> None:
        self._wire.observe(time.wire_s, exemplar)
        self._queue.observe(time.queued_s, exemplar)
        self._execute.observe(time.executed_s, exemplar)
