"""What rounds take where groups run one after another: those of one lane, or the only group of several.

There a row's time from round to round doubles with a second group, and halves when one of two ends, though no round
takes any longer. So what counts is the time of as many rounds as there may be lanes, whichever groups had them. Where
lanes share what computes, each lane runs one in that time too. The stages of a pipeline work side by side: full of
groups it runs as many rounds in about the time of one, and a group that is alone there counts as that much slower.
Knows nothing of what is done in rounds.
"""

from collections import deque


class TurnTimes:
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
