"""How long outputs become, learned from those that ended."""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

from coordinator.requests.generation import Generation

REMEMBERED = 128
"""Outputs whose lengths are kept."""


class OutputLengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: list[int] = []
        """The same lengths, the shortest first."""
        self._sums: list[int] = [0]
        """Sums of the longest 0, 1, 2, ... of them."""

    def ended(self, generation: Generation) -> None:
        self._latest.append(generation.output.count)
        self._sorted = sorted(self._latest)
        self._sums = [0, *accumulate(reversed(self._sorted))]

    def remaining(self, generation: Generation) -> float:
        """Return the expected tokens to come: from the mean of recent outputs longer than it is, within its limit."""
        count, most = generation.output.count, generation.output.remaining_count
        longer_count = len(self._sorted) - bisect_right(self._sorted, count)
        return min(most, self._sums[longer_count] / longer_count - count) if longer_count else most
