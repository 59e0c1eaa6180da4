"""Seconds of calls, foreseen from measured sums.

A call's time is a sum of parts, each with a price that is not below nothing, times a factor for the rounds that are in
flight at once, times what calls of just this size differ by. Work and wire spread about that, the more the more rounds
share the cores: without it rounds would hardly meet at a service, and wait too little. Knows nothing of services.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from typing import NamedTuple, TypeVar

from paceline.types import CallCosts

BENDS = (16, 64)
"""Tokens from which each costs more: a model reads its weights for few tokens as for one."""
KNOWN_CALLS = 8.0
"""Calls of one size after which half of what they differ by is believed."""
SWEEPS = 500
"""Passes over the prices; by then they have settled."""
MOST_SPREAD = 0.5
"""Work of one size that spreads more tells of pauses of the machine."""
MOST_WIRE_SPREAD = 1.0
"""The same of the wire, whose calls wait for a core."""

Parts = tuple[float, ...]
Key = TypeVar("Key", bound=Hashable)


class Size(NamedTuple):
    """Calls of one size are known together."""

    round_count_at_once: int
    row_count: int
    step_count: int
    prompt_bits: int


@dataclass(frozen=True)
class Work:
    """The amounts of one call, or their means over some."""

    round_count_at_once: int
    row_count: int
    step_count: int
    """Most drafts of a row."""
    drafted_count: float
    """Draft tokens of all rows."""
    prompt_count: float

    @property
    def parts(self) -> Parts:
        token_count = self.row_count + self.drafted_count
        over = (max(0.0, token_count - bend) for bend in BENDS)
        return 1.0, self.row_count, self.step_count, self.drafted_count, self.prompt_count, *over

    @property
    def size(self) -> Size:
        bits = int(self.prompt_count).bit_length()
        return Size(self.round_count_at_once, self.row_count, self.step_count, bits)


@dataclass(frozen=True)
class CallSeconds:
    executed_s: float
    wire_s: float
    own_s: float
    """The coordinator's own, beside the call."""


@dataclass(frozen=True)
class _Known:
    """A number of calls with about this work, and the mean of one of their times."""

    work: Work
    call_count: int
    seconds: float


class CallTimes:
    """Foresees calls to services of one model."""

    def __init__(self, calls: Sequence[CallCosts]) -> None:
        self._executed = _Curve(_known(calls, lambda one: one.executed_s))
        self._wire = _Curve(_known(calls, lambda one: one.wire_s))
        self._own = _Curve(_known(calls, lambda one: one.own_s))
        self._work_spreads = _spreads(calls, lambda one: (one.executed_s, one.executed_squares), MOST_SPREAD)
        self._wire_spreads = _spreads(calls, lambda one: (one.wire_s, one.wire_squares), MOST_WIRE_SPREAD)

    def foresee(self, work: Work) -> CallSeconds:
        """Return the mean seconds of calls with this work."""
        return CallSeconds(self._executed.seconds(work), self._wire.seconds(work), self._own.seconds(work))

    def draw(self, work: Work, rng: Random) -> CallSeconds:
        """Return seconds of one call: work and wire spread about their means as they did when they were measured."""
        mean, at_once = self.foresee(work), work.round_count_at_once
        of_work, of_wire = (_nearest(found, at_once, 0.0) for found in (self._work_spreads, self._wire_spreads))
        return CallSeconds(
            mean.executed_s * drawn_factor(of_work, rng), mean.wire_s * drawn_factor(of_wire, rng), mean.own_s
        )


def _known(calls: Iterable[CallCosts], seconds: Callable[[CallCosts], float]) -> list[_Known]:
    return [_Known(_work(one), one.call_count, seconds(one) / one.call_count) for one in calls if one.call_count]


def _work(calls: CallCosts) -> Work:
    count = calls.call_count
    drafted, prompt = calls.drafted_count / count, calls.prompt_count / count
    return Work(calls.round_count_at_once, calls.row_count, calls.step_count, drafted, prompt)


def _spreads(
    calls: Sequence[CallCosts], sums: Callable[[CallCosts], tuple[float, float]], most: float
) -> dict[int, float]:
    """Return by rounds at once how calls of one size vary: the coefficient of variation of a time.

    `sums` are the time's and its squares'. Calls with prompts have no say: prompts of one size differ in length.
    """
    alike: defaultdict[int, float] = defaultdict(float)
    squares: defaultdict[int, float] = defaultdict(float)
    for one in calls:
        if one.call_count and not one.prompt_count:
            seconds, squared = sums(one)
            alike[one.round_count_at_once] += seconds**2 / one.call_count
            squares[one.round_count_at_once] += squared
    return {one: min(most, sqrt(max(0.0, squares[one] - value) / value)) for one, value in alike.items() if value}


def drawn_factor(spread: float, rng: Random) -> float:
    """Draw from a log-normal distribution with mean 1 and this coefficient of variation."""
    deviation = sqrt(log(1 + spread**2))
    return exp(rng.gauss(-(deviation**2) / 2, deviation))


def _nearest(known: Mapping[int, float], wanted: int, otherwise: float) -> float:
    """Return the value of the nearest number that is known."""
    return known[min(known, key=lambda one: abs(one - wanted))] if known else otherwise


class _Curve:
    """One of the times of calls."""

    def __init__(self, known: Sequence[_Known]) -> None:
        self._prices = _fitted(known)
        self._at_once = _ratios(known, self._plain, lambda one: one.round_count_at_once, 0.0)
        self._sizes = _ratios(known, self._with_others, lambda one: one.size, KNOWN_CALLS)

    def seconds(self, work: Work) -> float:
        return self._with_others(work) * self._sizes.get(work.size, 1.0)

    def _plain(self, work: Work) -> float:
        return sum(price * amount for price, amount in zip(self._prices, work.parts, strict=True))

    def _with_others(self, work: Work) -> float:
        """Return the seconds with the factor of the nearest number of rounds at once that was measured."""
        return self._plain(work) * _nearest(self._at_once, work.round_count_at_once, 1.0)


def _ratios(
    known: Iterable[_Known], foreseen: Callable[[Work], float], key: Callable[[Work], Key], doubt: float
) -> dict[Key, float]:
    """Return by key how much longer calls took than was foreseen; `doubt` is calls that took just as long."""
    took: defaultdict[Key, float] = defaultdict(float)
    expected: defaultdict[Key, float] = defaultdict(float)
    for one in known:
        seconds, name = foreseen(one.work), key(one.work)
        took[name] += one.call_count * one.seconds + doubt * seconds
        expected[name] += (one.call_count + doubt) * seconds
    return {name: took[name] / value for name, value in expected.items() if value > 0}


def _fitted(known: Sequence[_Known]) -> list[float]:
    """Return the prices of parts, none below 0, that leave the least relative squares.

    Coordinate descent on the normal equations; parts are scaled, so that it settles soon.
    """
    rows = [(one.work.parts, one.call_count / max(one.seconds, 1e-9) ** 2, one.seconds) for one in known]
    count = len(Work(1, 0, 0, 0, 0).parts)
    scales = [sqrt(sum(weight * parts[place] ** 2 for parts, weight, _ in rows)) for place in range(count)]
    used = [place for place, scale in enumerate(scales) if scale]
    squares = {
        (one, other): sum(weight * parts[one] * parts[other] for parts, weight, _ in rows)
        / (scales[one] * scales[other])
        for one in used
        for other in used
    }
    products = {
        place: sum(weight * parts[place] * took for parts, weight, took in rows) / scales[place] for place in used
    }
    found = [0.0] * count
    for _ in range(SWEEPS):
        for place in used:
            others = sum(squares[place, other] * found[other] for other in used if other != place)
            found[place] = max(0.0, products[place] - others)
    return [price / scales[place] if scales[place] else 0.0 for place, price in enumerate(found)]
