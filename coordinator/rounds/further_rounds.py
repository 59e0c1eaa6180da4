"""How many rounds the target is to run by itself in a call.

Near, one where its heads draft: it saves a hop, and more save little while tokens and copies come later. Far, as many
as take about the time of the way, whatever drafts: each brings a token at least, in the time of a pass. Learns both
times from calls; knows nothing of rows.
"""

from dataclasses import dataclass

from coordinator.smoothing import smoothed
from paceline.checks import MAX_FURTHER_COUNT
from paceline.types import HopTime

TIMES_MEMORY = 0.8
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


class FurtherRounds:
    def __init__(self) -> None:
        self._way_s: float | None = None
        self._pass_s: float | None = None

    def called(self, verify: HopTime, round_count: int) -> None:
        """Note a call of the target, of so many rounds."""
        self._way_s = smoothed(self._way_s, verify.wire_s, TIMES_MEMORY)
        self._pass_s = smoothed(self._pass_s, verify.executed_s / round_count, TIMES_MEMORY)

    def counts(self, left_s: float | None) -> FurtherCounts:
        """Return the further rounds of a call now, whose requests have `left_s` seconds left; None: no deadline."""
        if self._way_s is None or self._pass_s is None:
            return NONE_FURTHER
        # A service that does not tell its work is taken for near.
        most = int(min(MAX_FURTHER_COUNT, self._way_s / self._pass_s)) if self._pass_s else 0
        call_s = self._way_s + (2 + most) * self._pass_s
        if left_s is not None and left_s < CALLS_LEFT * call_s:
            return NONE_FURTHER
        return FurtherCounts(max(1, most), most)
