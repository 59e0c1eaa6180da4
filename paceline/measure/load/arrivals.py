"""Arrival times of requests: a Poisson process, drawn from a seed, so that runs can be compared."""

import random
from collections.abc import Iterator
from itertools import islice, takewhile


def poisson_arrivals(
    rate_per_s: float, seed: int, *, duration_s: float | None = None, count: int | None = None
) -> Iterator[float]:
    """Yield arrivals in seconds since the start, `rate_per_s` a second on average, up to the first limit reached."""
    arrivals = _endless(rate_per_s, random.Random(seed))
    if duration_s is not None:
        arrivals = takewhile(lambda at_s: at_s < duration_s, arrivals)
    return islice(arrivals, count)


def _endless(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_per_s)
        yield at_s
