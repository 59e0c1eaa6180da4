"""Statistics of all rounds since the start, read through `DescribeCluster`."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from coordinator.requests.acceptance import by_place
from coordinator.rounds.cost_counts import CostCounts
from coordinator.rounds.counted_models import CountedModels
from coordinator.rounds.round_report import RoundReport
from paceline.types import ClusterStatistics, DraftSource, HopTime, UsageSums, add_usage

OTHER = "other"
"""Stands for draft models that are not counted by their names."""


class Statistics:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.costs = CostCounts(clock)
        self._round_count = 0
        self._fallback_round_count = 0
        self._drafted_count = 0
        self._committed_count = 0
        self._rows_by_accepted_count: Counter[int] = Counter()
        self._rounds_by_group_size: Counter[int] = Counter()
        self._waited_slot_count = 0
        self._waited_filled_count = 0
        self._preemption_count = 0
        self._round_s = 0.0
        self._propose = HopTime()
        self._verify = HopTime()
        self._sources: UsageSums = {}
        self._models = CountedModels(self._forget, clock)

    def count_report(self, report: RoundReport) -> None:
        """Count the tokens and times of a round, and the further ones of its call."""
        self._drafted_count += report.drafted_count
        self._committed_count += sum([row.committed_count for row in report.all_rows])
        self._rows_by_accepted_count.update([row.accepted_count for row in report.all_rows])
        for one in report.sources:
            name = one.model if self._models.counts(one.model) else OTHER
            add_usage(self._sources, one.source, name, one.drafted_count, one.accepted_count)
        self._round_count += len(report.further)
        self._rounds_by_group_size.update(map(len, report.further))
        self._round_s += report.duration_s
        self._propose = _sum(self._propose, report.propose)
        self._verify = _sum(self._verify, report.verify)

    def _forget(self, model: str) -> None:
        del self._sources[DraftSource.DRAFT, model]

    def count_round(self, *, group_size: int, batch_size: int, is_fallback: bool, others_wait: bool) -> None:
        """Count a round; `others_wait` says whether a full group would have been possible."""
        self._round_count += 1
        self._fallback_round_count += is_fallback
        self._rounds_by_group_size[group_size] += 1
        if others_wait:
            self._waited_slot_count += batch_size
            self._waited_filled_count += group_size

    def count_preemption(self) -> None:
        self._preemption_count += 1

    def snapshot(self) -> ClusterStatistics:
        rows = self._rows_by_accepted_count
        by_position = by_place([rows[n] for n in range(1, 1 + max(rows, default=0))])
        return ClusterStatistics(
            round_count=self._round_count,
            fallback_round_count=self._fallback_round_count,
            drafted_count=self._drafted_count,
            accepted_count=sum(by_position),
            committed_count=self._committed_count,
            accepted_counts_by_position=by_position,
            round_counts_by_group_size=tuple(sorted(self._rounds_by_group_size.items())),
            occupancy_while_waiting=(
                self._waited_filled_count / self._waited_slot_count if self._waited_slot_count else 1.0
            ),
            preemption_count=self._preemption_count,
            round_s=self._round_s,
            propose=self._propose,
            verify=self._verify,
            sources=tuple(map(replace, self._sources.values())),
        )


def _sum(one: HopTime, other: HopTime) -> HopTime:
    return HopTime(one.wire_s + other.wire_s, one.queued_s + other.queued_s, one.executed_s + other.executed_s)
