"""What a quantity costs, learnt while it is spent: least squares over the latest measurement of each amount of work."""

from collections import OrderedDict
from collections.abc import Sequence

from coordinator.smoothing import smoothed

MEMORY = 0.8
"""Weight of what was known of an amount of work after one more measurement of it."""
KEPT = 48
"""Amounts of work that are remembered: those measured last. A long run of one amount does not wash out the others."""
RIDGE = 1e-6
"""Keeps the equations solvable while all amounts are alike."""


class Regression:
    """`y` as a weighted sum of features. Knows nothing before the first measurement: then it predicts 0."""

    def __init__(self, feature_count: int) -> None:
        self._feature_count = feature_count
        self._measured: OrderedDict[tuple[float, ...], float] = OrderedDict()
        self._weights: list[float] | None = [0.0] * feature_count

    def add(self, features: tuple[float, ...], y: float) -> None:
        self._measured[features] = smoothed(self._measured.get(features), y, MEMORY)
        self._measured.move_to_end(features)
        if len(self._measured) > KEPT:
            self._measured.popitem(last=False)
        self._weights = None

    def predict(self, features: Sequence[float]) -> float:
        """At least 0: the features are amounts of work and `y` is what they cost."""
        if self._weights is None:
            self._weights = self._fit()
        return max(0.0, sum(weight * one for weight, one in zip(self._weights, features, strict=True)))

    def _fit(self) -> list[float]:
        places = range(self._feature_count)
        products = [[sum(one[a] * one[b] for one in self._measured) for a in places] for b in places]
        targets = [sum(one[a] * y for one, y in self._measured.items()) for a in places]
        return _solve(products, targets)


def _solve(products: list[list[float]], targets: list[float]) -> list[float]:
    """Gaussian elimination with pivoting on the ridged normal equations."""
    size = len(targets)
    rows = [[*row, target] for row, target in zip(products, targets, strict=True)]
    for index in range(size):
        rows[index][index] += RIDGE * (1 + products[index][index])
    for index in range(size):
        pivot = max(range(index, size), key=lambda row: abs(rows[row][index]))
        rows[index], rows[pivot] = rows[pivot], rows[index]
        for other in range(size):
            if other != index:
                factor = rows[other][index] / rows[index][index]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[index], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
