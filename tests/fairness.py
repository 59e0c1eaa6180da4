"""How likely a fair generator gives what was seen, or less likely things: p-values for large samples.

By hand, because where scipy is installed transformers imports a part of it into each process that runs a model, which
takes a second.
"""

from collections.abc import Sequence
from math import erfc, exp, sqrt

import torch


def chi_square_p(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Pearson's test of counts."""
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in zip(observed, expected, strict=True))
    halves = torch.tensor([(len(observed) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def gumbel_p(values: torch.Tensor) -> float:
    """Kolmogorov's test of numbers that are to follow the standard Gumbel distribution."""
    places = values.flatten().double().neg().exp().neg().exp().sort().values
    steps = torch.arange(len(places) + 1) / len(places)
    distance = float(torch.maximum(steps[1:] - places, places - steps[:-1]).max())
    terms = ((1 if one % 2 else -1) * exp(-2 * one**2 * len(places) * distance**2) for one in range(1, 100))
    return min(1.0, 2 * sum(terms))


def rank_correlation_p(one: torch.Tensor, other: torch.Tensor) -> float:
    """Spearman's test of numbers that are to be independent of each other."""
    ranks = torch.stack([values.flatten().argsort().argsort().double() for values in (one, other)])
    return erfc(abs(float(torch.corrcoef(ranks)[0, 1])) * sqrt((ranks.shape[1] - 1) / 2))
