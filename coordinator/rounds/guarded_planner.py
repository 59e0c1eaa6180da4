"""A planner whose errors cost speed alone: what it plans and learns decides no token, so no request may fail for it.

It owns what happens instead: a round without drafts, and a round that nothing is learned from. It knows nothing of how
drafts are planned.
"""

from collections.abc import Mapping, Sequence

import structlog

from coordinator.requests.generation import Generation
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.wishes import DraftPlanner, Wish

log = structlog.get_logger()


class GuardedPlanner:
    def __init__(self, planner: DraftPlanner) -> None:
        self._planner = planner
        self._error_count = 0

    @property
    def leeway(self) -> float:
        return self._planner.leeway

    @property
    def lane_count(self) -> int:
        return self._planner.lane_count

    def plan(self, group: Sequence[Generation], max_lengths: Mapping[str, int]) -> dict[Generation, Wish]:
        try:
            return self._planner.plan(group, max_lengths)
        except Exception as error:
            self.failed("a round has no drafts, because planning them failed unexpectedly", error)
            return {one: Wish() for one in group}

    def observe(self, wishes: Mapping[Generation, Wish], report: RoundReport, cycle_s: float) -> None:
        try:
            self._planner.observe(wishes, report, cycle_s)
        except Exception as error:
            self.failed("a round is not learned from, because that failed unexpectedly", error)

    def failed(self, words: str, error: Exception) -> None:
        """Tell the first error, the second, the fourth, and so on: there may be one in every round."""
        self._error_count += 1
        if self._error_count.bit_count() == 1:
            log.error(words, error_count=self._error_count, exc_info=error)
