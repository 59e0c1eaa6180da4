"""Texts that are never written: for each, how many drafts at a place would be right.

A draw belongs to a request and a position in its output, so clusters that answer the same requests have the same luck.
"""

from collections.abc import Sequence
from random import Random

from paceline.types import AcceptanceCounts, DraftSource, MeasuredCosts

LEAST_FACTOR, MOST_LIKELY = 0.1, 0.995


class Text:
    """What one output turns out to be."""

    def __init__(self, seed: str, rates: Sequence[float], deviation: float) -> None:
        """`deviation` is that of texts' rates beside each other, as a share of the rates."""
        self._rng = Random(seed)
        self._rates = rates
        self._factor = max(LEAST_FACTOR, self._rng.gauss(1.0, deviation))
        self._luck: list[float] = []

    def accepted_count(self, position: int, draft_count: int) -> int:
        """Return how many of so many drafts are right from this position of the output on."""
        while len(self._luck) < position + draft_count:
            self._luck.append(self._rng.random())
        for place in range(draft_count):
            rate = self._rates[min(place, len(self._rates) - 1)]
            if self._luck[position + place] >= min(MOST_LIKELY, rate * self._factor):
                return place
        return draft_count


class Texts:
    """All texts of a simulation."""

    def __init__(self, costs: MeasuredCosts, seed: int) -> None:
        found = [one for one in costs.acceptances if one.source is DraftSource.DRAFT and one.compared_counts]
        self._counts = max(found, key=lambda one: one.compared_counts[0], default=None)
        self._seed = seed

    @property
    def has_drafts(self) -> bool:
        return self._counts is not None

    def of(self, number: int) -> Text:
        rates, deviation = _rates(self._counts) if self._counts else ([0.0], 0.0)
        return Text(f"{self._seed} {number}", rates, deviation)


def _rates(counts: AcceptanceCounts) -> tuple[list[float], float]:
    rates = [right / compared for right, compared in zip(counts.right_counts, counts.compared_counts, strict=True)]
    usual = sum(counts.right_counts) / sum(counts.compared_counts)
    return rates, counts.output_deviation / usual if usual else 0.0
