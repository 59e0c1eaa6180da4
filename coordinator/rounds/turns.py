"""What a round takes where groups take turns in one lane.

There a row's time from round to round doubles with a second group, and halves when one of two ends, though no round
takes any longer. The time of as many rounds as there may be lanes is the same for any number of groups, and that in
which each lane runs one where lanes share what computes. Knows nothing of what is done in it.
"""

from collections import deque


class Turns:
    def __init__(self, lanes: int) -> None:
        """`lanes` is the most that run."""
        self._lanes = lanes
        self._taken_s: deque[float] = deque(maxlen=lanes)
        """What the latest rounds took."""
        self._ended_s = 0.0
        """When the latest round ended."""

    def ended(self, now_s: float, spent_s: float, others_s: float = 0.0) -> float:
        """Note a round that ends `spent_s` after its rows were ready. Return the seconds of as many rounds as lanes.

        `others_s` of its time were for other coordinators; `spent_s` is without them. A round takes the time since the
        one before ended, but not that in which no row was ready.
        """
        self._taken_s.append(min(spent_s, max(0.0, now_s - self._ended_s - others_s)))
        self._ended_s = now_s
        return sum(self._taken_s) / len(self._taken_s) * self._lanes
