"""Metrics of the coordinator: distributions as rounds and requests end, counts when they are asked for.

What `statistics` counts anyway is not counted a second time: it is read at the scrape. `docs/metrics.md` says what the
numbers mean.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.pool import SequencePool
from coordinator.round import RoundReport
from coordinator.statistics import Statistics
from paceline.metrics import ROUND_BUCKETS_S, ROW_BUCKETS, Exemplar, active_exemplar
from paceline.types import HopTime


class RoundMetrics:
    """Where the time of rounds goes."""

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
            "paceline_group_size", "Sequences in a round.", buckets=ROW_BUCKETS, registry=registry
        )
        self._wait = Histogram(
            "paceline_group_wait_seconds",
            "Time a live sequence waited to be grouped, each round.",
            buckets=ROUND_BUCKETS_S,
            registry=registry,
        )
        self._drafts = Counter("paceline_drafts", "Drafts verified: one a sequence and round.", registry=registry)
        self._draft_failures = Counter(
            "paceline_draft_failures", "Rounds whose call to the draft service failed.", registry=registry
        )
        self._failed = Counter("paceline_rounds_failed", "Rounds that failed their whole group.", registry=registry)

    def round_failed(self, waits_s: list[float]) -> None:
        """Count a round that failed its whole group."""
        self._group_taken(waits_s)
        self._failed.inc()

    def round_ended(self, waits_s: list[float], report: RoundReport) -> None:
        """Count a round whose sequences had waited so long for it."""
        self._group_taken(waits_s)
        exemplar = self._exemplar()
        self._duration.observe(report.duration_s, exemplar)
        if report.propose.total_s:
            self._draft.observe(report.propose, exemplar)
        self._verify.observe(report.verify, exemplar)
        self._own.observe(max(0.0, report.duration_s - report.propose.total_s - report.verify.total_s), exemplar)
        self._drafts.inc(sum(row.drafted_count > 0 for row in report.rows))
        if report.draft_error:
            self._draft_failures.inc()

    def _group_taken(self, waits_s: list[float]) -> None:
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


class Counted(Protocol):
    """What the scheduler knows at any moment."""

    @property
    def pool(self) -> SequencePool: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def draft_is_up(self) -> bool: ...


class ClusterCollector(Collector):
    """Counts and states, read at the moment of the scrape, in its thread."""

    def __init__(self, scheduler: Counted) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        pool, counted = self._scheduler.pool, self._scheduler.statistics.snapshot()
        for name, text, value in (
            ("sequences_running", "Sequences with a place in the pool.", pool.live_count),
            ("sequences_waiting", "Sequences waiting for a place.", pool.waiting_count),
            ("sequences_waiting_limit", "Most sequences that may wait; more are refused.", pool.queue_limit),
            ("draft_available", "1 unless the latest call to the draft service failed.", self._scheduler.draft_is_up),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", text, value)
        for name, text, value in (
            ("rounds", "Rounds run.", counted.round_count),
            (
                "fallback_rounds",
                "Rounds whose policy found no group of the kind it wants.",
                counted.fallback_round_count,
            ),
            ("draft_tokens", "Draft tokens verified.", counted.drafted_count),
            ("accepted_tokens", "Draft tokens accepted.", counted.accepted_count),
            ("committed_tokens", "Output tokens, accepted and the target's own.", counted.committed_count),
            ("preemptions", "Sequences that gave their cache up for others.", counted.preemption_count),
        ):
            yield CounterMetricFamily(f"paceline_{name}", text, value)
        positions = CounterMetricFamily(
            "paceline_accepted_tokens_per_position",
            "Draft tokens accepted, by their place in the draft, from 0.",
            labels=["position"],
        )
        for position, count in enumerate(counted.accepted_counts_by_position):
            positions.add_metric([str(position)], count)
        yield positions
