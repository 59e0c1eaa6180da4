"""What a round that has ended teaches: what rounds take and drafts are worth, for planners and for those who watch.

No token depends on it, so the next round's call goes out first (`Scheduler`). Knows nothing of what services cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from coordinator.replicas.way import Way
from coordinator.requests.generation import Generation
from coordinator.rounds.further_rounds import FurtherRounds
from coordinator.rounds.grouping import Grouping, Groups
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.wishes import Wish

log = structlog.get_logger()


@dataclass(frozen=True)
class EndedRound:
    groups: Groups
    """The way by which its group was formed."""
    wishes: Mapping[Generation, Wish]
    report: RoundReport
    waits_s: Sequence[float]
    """Seconds that each generation waited for it."""
    began_s: float
    ended_s: float
    in_flight_count: int
    """Rounds of all targets that were in flight when it began, with it."""
    takes_turns: bool
    """Whether groups ran one after another."""


class Lessons:
    def __init__(
        self, address: str, grouping: Grouping, way: Way, statistics: Statistics, metrics: RoundMetrics
    ) -> None:
        """`address` is the target's, for the log."""
        self.further = FurtherRounds()
        self._address = address
        self._grouping = grouping
        self._way = way
        self._statistics = statistics
        self._metrics = metrics

    def take_in(self, ended: EndedRound) -> None:
        self._metrics.round_ended(ended.waits_s, ended.report)
        self._statistics.count_report(ended.report)
        self._learn(ended)
        self._statistics.costs.add(ended.report, ended.in_flight_count, ended.ended_s - ended.began_s)

    def _learn(self, ended: EndedRound) -> None:
        groups, report = ended.groups, ended.report
        if self._grouping.observe(report.verify.executed_s, report.target_worked_s, report.duration_s):
            log.info("whether the target works for others changed", target=self._address, now=self._grouping.is_shared)
        groups.draft_worth.observe(report)
        self._way.called(report.propose.wire_s + report.verify.wire_s)
        self._way.took(report.duration_s - report.further_s)
        self.further.observe(report)
        # Work for other coordinators is no price of this round's drafts. With its time a second would give fewer
        # tokens, so drafts would seem cheap, and each coordinator would slow the others down.
        waited_s = sum(ended.waits_s) / len(ended.waits_s)
        own_s = waited_s + max(0.0, report.duration_s - report.others_s)
        turn_s = groups.turn_times.ended(ended.ended_s, own_s, report.others_s)
        if report.draft_error is None:
            groups.planner.observe(ended.wishes, report, turn_s if ended.takes_turns else own_s)
