"""Times of rounds by their draft count: measured, and smoothed across counts with few measurements.

Owns seconds only; knows nothing of acceptance. The time of a round is that of its whole cycle. So it includes every
effect of drafts: overlapping lanes, cores that both models want, drafts that were prepared.
"""

from dataclasses import dataclass

from coordinator.rounds.smoothing import smoothed

LEVEL_MEMORY = 0.97
"""Weight of earlier rounds in the level, the speed of the machine for all counts: it follows in some thirty rounds."""
USUAL_MEMORY = 0.998
"""Weight of earlier levels in the usual level."""
KEPT = 300.0
"""Rounds that a count's mean remembers."""
PRIOR_WEIGHT = 24.0
"""Weight of the line through all counts beside a count's own mean, in rounds."""
LONGEST = 1.5
"""A round counts as at most this many expected ones: a prompt in another lane or a pause says nothing."""
JUMP = 1.5
"""Factor between the level and the usual one from which earlier measurements are void."""


@dataclass
class _Mean:
    """Mean time of rounds with one draft count, as a multiple of the level."""

    value: float
    weight: float = 1.0


class RoundTimes:
    """Round times of groups of about one size."""

    def __init__(self) -> None:
        self._level_s: float | None = None
        self._usual_s = 0.0
        self._means: dict[int, _Mean] = {}

    @property
    def level_s(self) -> float:
        return self._level_s or 0.0

    @property
    def has_jumped(self) -> bool:
        return self._level_s is not None and not 1 / JUMP < self._level_s / self._usual_s < JUMP

    def weight(self, count: int) -> float:
        """Return the number of measured rounds with this draft count."""
        mean = self._means.get(count)
        return mean.weight if mean else 0.0

    def add(self, count: int, cycle_s: float) -> None:
        if self._level_s is None:
            self._level_s = self._usual_s = cycle_s
        mean = self._means.get(count)
        if mean is None:
            self._means[count] = _Mean(cycle_s / self._level_s)
            return
        taken_s = min(cycle_s, LONGEST * mean.value * self._level_s)
        memory = mean.weight / (mean.weight + 1)
        before = mean.value
        mean.value = smoothed(mean.value, taken_s / self._level_s, memory)
        mean.weight = min(mean.weight + 1, KEPT)
        # A count with few rounds says little about the level.
        level_memory = 1 - (1 - LEVEL_MEMORY) * memory
        self._level_s = smoothed(self._level_s, taken_s / before, level_memory)
        self._usual_s = smoothed(self._usual_s, self._level_s, USUAL_MEMORY)

    def expected_s(self, count: int) -> float:
        """Return the expected seconds of a round with this draft count."""
        return self.predict(count)[count] * self.level_s

    def predict(self, most: int) -> list[float]:
        """Return the times of rounds with 0 to `most` drafts, as multiples of the level."""
        start, slope = self._line()
        times = [self._blend(count, start + slope * count) for count in range(most + 1)]
        weights = [PRIOR_WEIGHT + self.weight(count) for count in range(1, most + 1)]
        return times[:1] + _never_less(times[1:], weights)

    def _blend(self, count: int, line: float) -> float:
        mean = self._means.get(count)
        if mean is None:
            return max(line, 1e-6)
        if count == 0:
            return mean.value  # drafting has costs of its own: the line is of rounds with drafts
        return (PRIOR_WEIGHT * max(line, 1e-6) + mean.weight * mean.value) / (PRIOR_WEIGHT + mean.weight)

    def _line(self) -> tuple[float, float]:
        """Return start and slope of the line through the counts with drafts, by least squares."""
        known = [(count, mean.weight, mean.value) for count, mean in self._means.items() if count]
        if not known:
            return (self._means[0].value if self._means else 1.0), 0.0
        total = sum(weight for _, weight, _ in known)
        centre = sum(count * weight for count, weight, _ in known) / total
        middle = sum(value * weight for _, weight, value in known) / total
        spread = sum(weight * (count - centre) ** 2 for count, weight, _ in known)
        slope = sum(weight * (count - centre) * (value - middle) for count, weight, value in known)
        slope = max(0.0, slope / spread) if spread else 0.0
        return middle - slope * centre, slope


def _never_less(values: list[float], weights: list[float]) -> list[float]:
    """Return the nearest values that never decrease, by weighted squares: more drafts take no less time.

    Neighbours out of order become their mean (pool adjacent violators).
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] >= block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            block = (before[0] * before[1] + block[0] * block[1]) / total, total, before[2] + block[2]
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]
