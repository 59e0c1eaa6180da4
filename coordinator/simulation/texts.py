"""Texts that are never written: for each, how many drafts at a place would be right.

A draw belongs to a request and a position in its output, so clusters that answer the same requests have the same luck.
"""

from collections.abc import Sequence
from random import Random

from paceline.simulate.call_times import drawn_factor
from paceline.types import AcceptanceCounts, MeasuredCosts


class Text:
    """What one output turns out to be."""

    def __init__(self, seed: str, rates: Sequence[float], spread: float) -> None:
        """`rates` are the chances of the first, second, ... draft; `spread` is how texts' misses vary beside luck.

        Texts differ in how often they are missed, and few much: most are about as easy, and some far harder.
        """
        self._rng = Random(seed)
        factor = drawn_factor(spread, self._rng)
        self._rates = [1 - (1 - rate) * factor for rate in rates]
        self._luck: list[float] = []

    def accepted_count(self, position: int, draft_count: int) -> int:
        """Return how many of so many drafts are right from this position of the output on."""
        while len(self._luck) < position + draft_count:
            self._luck.append(self._rng.random())
        for place in range(draft_count):
            rate = self._rates[min(place, len(self._rates) - 1)]
            if self._luck[position + place] >= rate:
                return place
        return draft_count


class Texts:
    """All texts of a simulation, by how often drafts of one model were right."""

    def __init__(self, costs: MeasuredCosts, draft_model: str, seed: int) -> None:
        self._counts = costs.drafts_of(draft_model)
        self._seed = seed

    @property
    def has_drafts(self) -> bool:
        return self._counts is not None

    def of(self, number: int) -> Text:
        rates, spread = _rates(self._counts) if self._counts else ([0.0], 0.0)
        return Text(f"{self._seed} {number}", rates, spread)


def _rates(counts: AcceptanceCounts) -> tuple[list[float], float]:
    """Return the chance at each place, and the coefficient of variation of texts' misses."""
    rates = [right / compared for right, compared in zip(counts.right_counts, counts.compared_counts, strict=True)]
    missed = 1 - counts.rate
    return rates, counts.output_deviation / missed if missed else 0.0
