"""How many rounds the target is to run by itself in a call.

Near, one where its heads draft: it saves a hop, and more save little while tokens and copies come later. Far, as many
as take about the time of the way, whatever drafts, if plain ones give tokens faster than rounds do that cross it.
Learns from calls without prompts; knows nothing of rows.
"""

from collections import deque
from dataclasses import dataclass

from coordinator.rounds.round_report import RoundReport
from coordinator.smoothing import smoothed
from paceline.checks import MAX_FURTHER_COUNT

FAR_WAY_S = 0.003
"""Least way to a far target: a shorter one is that of a host, and of its busy cores."""
WAYS = 16
"""Latest calls, of which the shortest way counts: others waited for cores. A target is near until there are as many."""
CALLS_LEFT = 4
"""Calls for which a deadline must leave time: a call that it cuts off loses all of its rounds."""


@dataclass(frozen=True)
class FurtherCounts:
    """Further rounds of a call."""

    with_heads: int = 0
    """Of rows for which the target's heads draft."""
    without: int = 0
    """Of other rows; 0 where the target is near."""


NONE_FURTHER = FurtherCounts()
NEAR = FurtherCounts(1)


class FurtherRounds:
    def __init__(self) -> None:
        self._ways_s: deque[float] = deque(maxlen=WAYS)
        self._pass_s: float | None = None
        """Time of a round in the target."""
        self._round_s: float | None = None
        """Time of a call's first round, drafts and way included."""
        self._row_tokens: float | None = None
        """Tokens that a row gets from it."""

    def observe(self, report: RoundReport) -> None:
        if report.prompt_token_count or not report.rows:
            return
        self._ways_s.append(report.verify.wire_s)
        self._pass_s = smoothed(self._pass_s, report.verify.executed_s / report.round_count)
        self._round_s = smoothed(self._round_s, report.duration_s - report.further_s)
        tokens = sum([row.committed_count for row in report.rows])
        self._row_tokens = smoothed(self._row_tokens, tokens / len(report.rows))

    def counts(self, left_s: float | None, group_count: int) -> FurtherCounts:
        """Return the further rounds of a call now, where so many groups share the target.

        Its requests have `left_s` seconds left; None: no deadline.
        """
        if self._pass_s is None or self._round_s is None or self._row_tokens is None:
            return NEAR
        way_s = min(self._ways_s)
        # A service that does not tell its work is taken for near.
        is_far = self._pass_s > 0 and len(self._ways_s) == WAYS and way_s >= FAR_WAY_S
        most = int(min(MAX_FURTHER_COUNT, way_s / self._pass_s)) if is_far else 0
        call_s = self._round_s + max(1, most) * self._pass_s
        if left_s is not None and left_s < CALLS_LEFT * call_s:
            return NONE_FURTHER
        # Other groups' rounds fill the time of the way too.
        are_faster = self._row_tokens * self._pass_s * group_count < self._round_s
        return FurtherCounts(most, most if are_faster else 0) if most else NEAR
