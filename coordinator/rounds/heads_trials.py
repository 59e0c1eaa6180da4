"""When the target's heads are asked though they do not seem to pay, or left out though they do, to notice a change.

Asking them shows what they are worth, and leaving them out what a round takes without them. All trials lose a small
share of the time. Times are multiples of the costs' unit, which is about a plain round.
"""

SHARE = 0.005
"""Share of all time that trials may lose."""
AT_ONCE = 4.0
"""Time that trials may lose at first, or after a long time without any."""
LEAST = 0.03
"""Least time that a trial is taken to lose: what seems to cost nothing was measured badly."""


class HeadsTrials:
    def __init__(self) -> None:
        self._left = AT_ONCE
        """Time that trials may lose now."""

    def passed(self, time: float) -> None:
        """Count the time of a round."""
        self._left = min(AT_ONCE, self._left + SHARE * time)

    def is_due(self, loss: float) -> bool:
        """Return whether to do now what is expected to lose so much time; if so, it counts as lost."""
        loss = max(LEAST, loss)
        if self._left < loss:
            return False
        self._left -= loss
        return True
