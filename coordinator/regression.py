"""Least squares that forgets: what a quantity costs, learnt while it is spent."""

from collections.abc import Sequence

MEMORY = 0.98
"""Weight of what was known after one more observation: about the last fifty count."""
RIDGE = 1e-6
"""Keeps the equations solvable while all observations are alike."""


class Regression:
    """`y` as a weighted sum of features. Knows nothing before the first observation: then it predicts 0."""

    def __init__(self, feature_count: int) -> None:
        self._products = [[0.0] * feature_count for _ in range(feature_count)]
        self._targets = [0.0] * feature_count
        self._weights: list[float] | None = [0.0] * feature_count

    def add(self, features: Sequence[float], y: float) -> None:
        for row, one in zip(self._products, features, strict=True):
            for column, other in enumerate(features):
                row[column] = MEMORY * row[column] + one * other
        self._targets = [MEMORY * total + one * y for total, one in zip(self._targets, features, strict=True)]
        self._weights = None

    def predict(self, features: Sequence[float]) -> float:
        """At least 0: the features are amounts of work and `y` is what they cost."""
        if self._weights is None:
            self._weights = _solve(self._products, self._targets)
        return max(0.0, sum(weight * one for weight, one in zip(self._weights, features, strict=True)))


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
