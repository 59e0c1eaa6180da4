"""Log-linear laws by least squares, with intervals. Knows nothing of drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import NormalDist, fmean

from paceline.errors import InvalidRequest

CONFIDENCE = 0.95
LEAST_FREEDOM = 1e-9
"""Less is none but for rounding: the law goes through a point whatever its value, and the others foresee nothing there.
"""


@dataclass(frozen=True)
class Estimate:
    value: float
    margin: float
    """Half of the interval that holds the truth in `CONFIDENCE` of cases, if the law does."""


@dataclass(frozen=True)
class LogLinearLaw:
    """`y = c0 + c1 ln x1 + c2 ln x2 + ...`, fitted to points."""

    coefficients: tuple[Estimate, ...]
    r_squared: float
    deviation: float
    """Standard deviation of what the law leaves of points."""
    inverse: tuple[tuple[float, ...], ...]
    """Of the normal equations' matrix."""
    freedom: int
    """Points beyond coefficients."""
    left_out_error: float
    """Root of the mean square of what each point is missed by when the law is fitted to the others; infinite where one
    is all that the law knows of its kind."""

    def predict(self, quantities: Sequence[float]) -> Estimate:
        """Return what to expect of a new point; its margin holds the point itself, and not only the mean."""
        row = _row(quantities)
        value = sum(one.value * x for one, x in zip(self.coefficients, row, strict=True))
        spread = _leverage(self.inverse, row)
        return Estimate(value, student_quantile(self.freedom) * self.deviation * sqrt(1 + spread))


def fit(quantities: Sequence[Sequence[float]], values: Sequence[float]) -> LogLinearLaw:
    """Fit a law to points; each has its quantities, above 0, and its value.

    Raise InvalidRequest where there are too few points, or a quantity is the same in all.
    """
    rows = [_row(one) for one in quantities]
    width = len(rows[0]) if rows else 0
    if len(rows) <= width + 1:
        raise InvalidRequest(f"{len(rows)} points are too few for a law of {width} numbers; give {width + 2} or more")
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    inverse = _inverse(matrix)
    products = [sum(row[i] * value for row, value in zip(rows, values, strict=True)) for i in range(width)]
    found = [sum(one * product for one, product in zip(entries, products, strict=True)) for entries in inverse]
    rests = [
        value - sum(c * x for c, x in zip(found, row, strict=True)) for row, value in zip(rows, values, strict=True)
    ]
    freedom, mean = len(rows) - width, fmean(values)
    deviation = sqrt(sum(rest**2 for rest in rests) / freedom)
    total = sum((value - mean) ** 2 for value in values)
    left_out = [_left_out(rest, 1 - _leverage(inverse, row)) for rest, row in zip(rests, rows, strict=True)]
    margins = [student_quantile(freedom) * deviation * sqrt(max(0.0, inverse[i][i])) for i in range(width)]
    return LogLinearLaw(
        tuple(map(Estimate, found, margins)),
        1 - sum(rest**2 for rest in rests) / total if total else 1.0,
        deviation,
        tuple(map(tuple, inverse)),
        freedom,
        sqrt(fmean(one**2 for one in left_out)),
    )


def _left_out(rest: float, freedom: float) -> float:
    """Return by how much the others miss a point, of what a law that knows it leaves of it."""
    return rest / freedom if freedom > LEAST_FREEDOM else inf


def _leverage(inverse: Sequence[Sequence[float]], row: Sequence[float]) -> float:
    """Return how much a point's own value moves the law there; 1 if it is all that the law knows of there."""
    return sum(
        x * entry * other
        for x, entries in zip(row, inverse, strict=True)
        for other, entry in zip(row, entries, strict=True)
    )


def _row(quantities: Sequence[float]) -> list[float]:
    return [1.0, *map(log, quantities)]


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Invert by Gauss and Jordan, with pivots of the largest number."""
    count = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(count))] for i, row in enumerate(matrix)]
    for place in range(count):
        pivot = max(range(place, count), key=lambda i: abs(rows[i][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        if abs(rows[place][place]) < 1e-9 * abs(matrix[0][0]):
            raise InvalidRequest("a quantity is the same in all points, or follows another; vary each by itself")
        rows[place] = [one / rows[place][place] for one in rows[place]]
        for i in range(count):
            if i != place:
                factor = rows[i][place]
                rows[i] = [one - factor * own for one, own in zip(rows[i], rows[place], strict=True)]
    return [row[count:] for row in rows]


def student_quantile(freedom: int) -> float:
    """Return the half width of an interval in standard errors, by Abramowitz and Stegun, 26.7.5."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum((term / float(freedom) ** power for power, term in enumerate(terms, 1)), start=z)
