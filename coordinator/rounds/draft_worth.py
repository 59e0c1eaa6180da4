"""The worth of drafts: the time that drafting may take before it costs more than it saves, from measured rounds.

A round with drafts yields g tokens a generation and takes propose and verify; g rounds without drafts yield as many and
take g verifies. With one lane the two hops follow each other, so drafts help while propose < (g - 1) verify. With
more they overlap, and the slower one sets the pace: drafts help while propose < g verify.
"""

from coordinator.rounds.round_report import RoundReport
from coordinator.smoothing import smoothed
from paceline.types import DraftSource


class DraftWorth:
    def __init__(self, lanes: int, leeway: float) -> None:
        """`leeway` is a factor on the estimated worth."""
        self._overlap = lanes > 1
        self._leeway = leeway
        self._tokens: float | None = None
        """Mean tokens a generation gets from a round with drafts."""
        self._verify_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """The worth of a round's drafts in seconds; None until a round with drafts was seen."""
        if self._tokens is None or self._verify_s is None:
            return None
        saved = self._tokens if self._overlap else self._tokens - 1
        return max(0.0, saved * self._verify_s) * self._leeway

    def observe(self, report: RoundReport) -> None:
        self._verify_s = smoothed(self._verify_s, report.verify.total_s / report.pass_count)
        drafted = [row for row in report.rows if row.source is DraftSource.DRAFT]
        if drafted:
            self._tokens = smoothed(self._tokens, sum(row.committed_count for row in drafted) / len(drafted))
