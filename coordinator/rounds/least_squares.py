"""Least squares over rounds, of which earlier ones fade: the prices of parts, and how far they may be trusted.

Owns the normal equations. Knows nothing of what the parts are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add, mul, sub

MEMORY = 0.996
"""Weight of earlier rounds in the prices after one more."""
HEAVIEST = 1e9
"""Weight of a round after which all are made lighter."""


@dataclass
class FadingSums:
    """Sums over rounds, of which the normal equations of least squares are made. Parts are named by their places.

    To let earlier rounds fade, each weighs more than the one before.
    """

    squares: list[list[float]] = field(default_factory=list)
    """Of each part with those up to it: what is on the other side of the diagonal is the same."""
    products: list[float] = field(default_factory=list)
    weight: float = 1.0
    """The latest round's."""

    def faded(self, share: float) -> "FadingSums":
        """Return sums in which the latest round weighs so much."""
        share /= self.weight
        return FadingSums(
            [[share * one for one in row] for row in self.squares], [share * one for one in self.products]
        )

    def add(self, amounts: Sequence[float], took: float, weight: float) -> None:
        """Add a round, which weighs `weight` times as much as others."""
        if self.weight > HEAVIEST:
            faded = self.faded(1.0)
            self.squares, self.products, self.weight = faded.squares, faded.products, 1.0
        for place in range(len(self.products), len(amounts)):
            self.squares.append([0.0] * (place + 1))
            self.products.append(0.0)
        self.weight /= MEMORY
        done = [(place, amount) for place, amount in enumerate(amounts) if amount]
        for number, (place, amount) in enumerate(done, 1):
            weighed = self.weight * weight * amount
            self.products[place] += weighed * took
            row = self.squares[place]
            for other, value in done[:number]:
                row[other] += weighed * value

    def add_all(self, other: "FadingSums") -> None:
        """Add sums that may lack the last parts, faded so that their latest round weighs 1."""
        share = 1.0 / other.weight
        for place, (row, product) in enumerate(zip(other.squares, other.products, strict=True)):
            self.squares[place] = [*map(add, self.squares[place], map(mul, repeat(share), row))]
            self.products[place] += share * product

    def fitted(self, places: Sequence[int]) -> list[float]:
        """Return the prices of the parts at these places, which alone are taken to cost anything."""
        return self._solved(places, self.products)

    def variance(self, amounts: Sequence[float]) -> float:
        """Return by how much the fitted time of these amounts varies, of the variance of a round of weight 1."""
        solved = self._solved(range(len(amounts)), amounts)
        found: float = sum(map(mul, solved, amounts))
        return max(0.0, found)

    def _solved(self, places: Sequence[int], right_sides: Sequence[float]) -> list[float]:
        """Solve the normal equations of the parts at these places, by Gauss's elimination.

        First guesses must be among the sums: with them every pivot is greater than 0.
        """
        # Of each equation what is before the diagonal is left out: it is eliminated, and the same as in those before.
        rows = [
            [*(self.squares[other][one] for other in places[number:]), right_sides[one]]
            for number, one in enumerate(places)
        ]
        for number, pivot in enumerate(rows, 1):
            for before, row in enumerate(rows[number:], 1):
                if share := pivot[before] / pivot[0]:
                    row[:] = map(sub, row, map(mul, repeat(share), pivot[before:]))
        found: list[float] = []
        for first, *row, right in reversed(rows):
            found.insert(0, (right - sum(map(mul, row, found))) / first)
        return found
