"""How many rounds the target is to run by itself in a call.

Near, one where its heads draft: it saves a hop, and more save little while tokens and copies come later. Far, as many
as take about the time of the way, also in a group for which nothing drafts: each brings a token in the time of a pass.
Learns from calls without prompts; knows nothing of rows.
"""

from collections import deque
from dataclasses import dataclass

from coordinator.rounds.round_report import RoundReport
from coordinator.smoothing import smoothed
from paceline.checks import MAX_FURTHER_COUNT

FAR_WAY_S = 0.003
"""Least way to a far target: a shorter one may be that of a host and its cores."""
WAYS = 16
"""Latest calls, of which the shortest way counts: others waited for cores. A target is near until there are as many."""
LEAST_SHARE = 2 / 3
"""Least share of a call's rows that take part in further rounds. A pass of few rows takes nearly as long as one of all,
and the others wait: for a draft service, or with what follows their copies."""
CALLS_LEFT = 4
"""Calls for which a deadline must leave time: a call that it cuts off loses all of its rounds."""


@dataclass(frozen=True)
class FurtherCounts:
    """Further rounds of a call."""

    with_heads: int = 0
    """Of rows for which the target's heads draft."""
    plain: int = 0
    """Of rows of a group that has no drafts; 0 where the target is near."""


NONE_FURTHER = FurtherCounts()
NEAR = FurtherCounts(1)


class FurtherRounds:
    def __init__(self) -> None:
        self._ways_s: deque[float] = deque(maxlen=WAYS)
        self._pass_s = 0.0
        """Mean time of a round in the target; 0 where it is not known, or not told."""

    def observe(self, report: RoundReport) -> None:
        if report.prompt_token_count or not report.rows:
            return
        self._ways_s.append(report.verify.wire_s)
        self._pass_s = smoothed(self._pass_s or None, report.verify.executed_s / report.pass_count)

    def counts(self, left_s: float | None) -> FurtherCounts:
        """Return the further rounds of a call now, whose requests have `left_s` seconds left; None: no deadline."""
        way_s = min(self._ways_s, default=0.0)
        is_far = self._pass_s > 0 and len(self._ways_s) == WAYS and way_s >= FAR_WAY_S
        most = int(min(MAX_FURTHER_COUNT, way_s / self._pass_s)) if is_far else 0
        if left_s is not None and left_s < CALLS_LEFT * (way_s + (1 + max(1, most)) * self._pass_s):
            return NONE_FURTHER
        return FurtherCounts(most, most) if most else NEAR
