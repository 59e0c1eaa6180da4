"""How long outputs become, learned from those that ended."""

from collections import deque

from coordinator.requests.generation import Generation

REMEMBERED = 128
"""Outputs whose lengths are kept."""


class OutputLengths:
    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)

    def ended(self, generation: Generation) -> None:
        self._lengths.append(generation.output.count)

    def remaining(self, generation: Generation) -> float:
        """Return the expected tokens to come: from the mean of recent outputs longer than it is, within its limit."""
        count, most = generation.output.count, generation.output.remaining_count
        longer = [length - count for length in self._lengths if length > count]
        return min(most, sum(longer) / len(longer)) if longer else most
