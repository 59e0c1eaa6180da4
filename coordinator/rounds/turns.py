"""What a round takes of all groups' time, where services are near.

There groups wait for whoever computes. So a row's time from round to round doubles where two groups take turns, and
halves when one of them ends, though no round takes any longer. A planner therefore learns from the time from one end of
a round to the next, of as many rounds as there are lanes: it is the same for any number of groups. Knows nothing of
what is done in that time.
"""

from collections import deque


class Turns:
    def __init__(self, lanes: int) -> None:
        """`lanes` is the most that run."""
        self._lanes = lanes
        self._taken_s: deque[float] = deque(maxlen=lanes)
        self._ended_s = 0.0
        """When the latest round ended."""

    def ended(self, now_s: float, spent_s: float) -> float:
        """Note a round that ends `spent_s` after its rows were ready. Return the seconds of as many rounds as lanes.

        While no row was ready, nothing is counted.
        """
        self._taken_s.append(min(spent_s, now_s - self._ended_s))
        self._ended_s = now_s
        return sum(self._taken_s) / len(self._taken_s) * self._lanes
