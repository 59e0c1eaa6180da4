"""What the parts of a round cost, learned from the times of whole rounds.

Owns seconds only; knows nothing of acceptance. A round's time is that of its whole cycle, so the cost of a part
includes every effect it has: lanes that overlap, cores that two models want. The time is taken as a sum of parts, each
with a price that is not negative; prices are fitted by weighted least squares which forget. What a sum of parts cannot
show, such as steps in the time of a pass, is kept beside it, by the draft count.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.rounds.round_report import DraftCall, RoundReport
from coordinator.smoothing import smoothed

MEMORY = 0.996
"""Weight of earlier rounds in the prices after one more."""
PRIOR_ROUNDS = 3.0
"""Weight of the first guess of a price, in rounds that have a usual amount of its part."""
JUMP = 1.5
"""Factor between times and what is expected of them from which earlier rounds are forgotten, but for a trace."""
DRIFT_MEMORY = 0.9
TRACE = 0.05
LEAST = 1e-3
"""Least time that is expected of a round, in units."""
LONGEST = 2.0
"""A round without prompts counts as at most this many expected ones: a pause says nothing."""
REST_WEIGHT = 8.0
"""Rounds of one draft count after which half of what remains for it is believed."""
KNOWN = 24.0
"""Rounds of one draft count after which a change of its times is one of the machine."""
REST_MOST = 200.0
"""Rounds that such a remainder remembers."""

BENDS = (16, 64)
"""Tokens of a verify from which each costs more: a model reads its weights for few tokens as for one."""

CONSTANT, DRAFTED, PROMPT, HEADS = "constant", "drafted", "prompt", "heads"
OVER = tuple(f"over {bend}" for bend in BENDS)
CALL, STEP, TOKEN, CAUGHT_UP = "call", "step", "token", "caught up"
DECODING = {CONSTANT, DRAFTED, HEADS, *OVER, CALL, STEP, TOKEN}
"""Parts of rounds that bring no prompt."""

FIRST = {
    CONSTANT: (1.0, 1.0),
    DRAFTED: (0.02, 8.0),
    OVER[0]: (0.0, 8.0),
    OVER[1]: (0.0, 32.0),
    PROMPT: (0.01, 20.0),
    HEADS: (0.02, 2.0),
    CALL: (0.2, 1.0),
    STEP: (0.05, 4.0),
    TOKEN: (0.002, 16.0),
    CAUGHT_UP: (0.005, 20.0),
}
"""For each part: its first price, as a share of a plain round's time, and its usual amount."""

Part = tuple[str, str]
"""What is done, and by which draft model; empty for the target's own work."""


@dataclass(frozen=True, slots=True)
class RoundWork:
    """The amounts of a round's parts."""

    row_count: int
    drafted_count: int = 0
    """Draft tokens that the target verifies."""
    prompt_count: int = 0
    """Tokens that the target computes before it can decode."""
    draft_calls: Mapping[str, DraftCall] | None = None
    heads_count: int = 0
    """Tokens that the target's heads draft."""

    @staticmethod
    def of(report: RoundReport) -> "RoundWork":
        rows, calls = len(report.rows), report.draft_calls
        return RoundWork(rows, report.drafted_count, report.prompt_token_count, calls, report.heads_count)

    def amounts(self) -> dict[Part, float]:
        amounts: dict[Part, float] = {
            (CONSTANT, ""): 1.0,
            (DRAFTED, ""): self.drafted_count,
            (PROMPT, ""): self.prompt_count,
        }
        for part, bend in zip(OVER, BENDS, strict=True):
            amounts[part, ""] = max(0, self.row_count + self.drafted_count - bend)
        if self.heads_count:
            amounts[HEADS, ""] = self.heads_count
        for model, call in (self.draft_calls or {}).items():
            amounts |= {
                (CALL, model): 1.0,
                (STEP, model): call.step_count,
                (TOKEN, model): call.token_count,
                (CAUGHT_UP, model): call.caught_up_count,
            }
        return amounts

    @property
    def step_count(self) -> int:
        return max((call.step_count for call in (self.draft_calls or {}).values()), default=0)


@dataclass
class _Sums:
    """Sums over rounds, of which the normal equations of least squares are made."""

    squares: dict[tuple[Part, Part], float] = field(default_factory=dict)
    products: dict[Part, float] = field(default_factory=dict)

    def square(self, one: Part, other: Part) -> float:
        return self.squares.get((one, other) if one <= other else (other, one), 0.0)

    def fade(self, share: float) -> None:
        """Let what was learned count only so much."""
        self.squares = {parts: share * value for parts, value in self.squares.items()}
        self.products = {part: share * value for part, value in self.products.items()}

    def faded(self, share: float) -> "_Sums":
        found = _Sums(self.squares, self.products)
        found.fade(share)  # which makes them anew
        return found

    def add(self, amounts: Mapping[Part, float], took: float, weight: float) -> None:
        weighed = sorted(amounts.items())
        for place, (part, amount) in enumerate(weighed):
            self.products[part] = self.products.get(part, 0.0) + weight * amount * took
            for other, value in weighed[place:]:
                self.squares[part, other] = self.squares.get((part, other), 0.0) + weight * amount * value


@dataclass
class _Mean:
    """Mean time and amounts of rounds with one draft count."""

    count: float = 0.0
    """Rounds that it is of."""
    time: float = 0.0
    amounts: dict[Part, float] = field(default_factory=dict)

    def add(self, amounts: Mapping[Part, float], took: float) -> None:
        self.count = min(self.count + 1, REST_MOST)
        self.time += (took - self.time) / self.count
        for part in {**self.amounts, **amounts}:
            before = self.amounts.get(part, 0.0)
            self.amounts[part] = before + (amounts.get(part, 0.0) - before) / self.count


class RoundCosts:
    """Prices of the parts of rounds with groups of about one size. Times are multiples of a unit."""

    def __init__(self, lanes: int) -> None:
        self._recent: deque[dict[Part, float]] = deque(maxlen=lanes)
        """Amounts of the latest rounds of all lanes: the round of another lane takes its time from this one's."""
        self.unit_s = 0.0
        """Seconds of the unit, about a plain round's; 0 before any round."""
        self._prices: dict[Part, float] = {}
        self._sums: dict[frozenset[str], _Sums] = {}
        """By the models that rounds asked. Each forgets only as it learns: one way may be out of use for long."""
        self._means: dict[int, _Mean] = {}
        """By draft count: what a fit leaves of the mean time is kept beside it."""
        self._round_counts: dict[int, int] = {}
        self._drift = 1.0
        """Mean of the latest times over what was expected of them."""

    def as_guess(self) -> "RoundCosts":
        """Return costs that begin with these, and soon follow what they learn themselves."""
        guess = RoundCosts(self._recent.maxlen or 1)
        guess.unit_s, guess._prices = self.unit_s, dict(self._prices)
        guess._sums = {models: one.faded(TRACE) for models, one in self._sums.items()}
        return guess

    @property
    def models(self) -> list[str]:
        """Models of draft services that were asked."""
        return [model for part, model in self._prices if part == CALL]

    def round_count(self, step_count: int) -> int:
        """Return how many rounds with this many steps were seen."""
        return self._round_counts.get(step_count, 0)

    def price(self, part: str, model: str = "") -> float:
        """Return the price of one unit of a part."""
        return self._prices.get((part, model), FIRST[part][0])

    def drafted_price(self, bend_count: float) -> float:
        """Return the price of one more draft token in a verify that is beyond so many bends, or beyond part of one."""
        shares = (min(1.0, max(0.0, bend_count - place)) for place in range(len(OVER)))
        return self.price(DRAFTED) + sum(share * self.price(part) for share, part in zip(shares, OVER, strict=True))

    def predict(self, work: RoundWork) -> float:
        """Return the time of a round with this work."""
        return max(LEAST, self._sum(work.amounts()) + self._rest(work.step_count))

    def catching_up(self, work: RoundWork) -> float:
        """Return the time in which draft services take in what they had missed."""
        return sum(
            self.price(CAUGHT_UP, model) * call.caught_up_count for model, call in (work.draft_calls or {}).items()
        )

    def add(self, work: RoundWork, cycle_s: float) -> None:
        amounts = work.amounts()
        self._recent.append(amounts)
        mean = _mean(self._recent)
        self.unit_s = self.unit_s or cycle_s / self._sum(mean)
        expected = max(LEAST, self._sum(mean) + self._rest(work.step_count))
        took = cycle_s / self.unit_s
        if all(part in DECODING or not amount for (part, _), amount in mean.items()):
            took = min(took, LONGEST * expected)
            known = self._means.setdefault(work.step_count, _Mean())
            known.add(mean, took)
            if known.count > KNOWN:  # what is hardly known says nothing of a change
                self._note_drift(took / expected)
        self._learn(mean, took, expected)
        self._round_counts[work.step_count] = self.round_count(work.step_count) + 1

    def fit(self) -> None:
        """Fit the prices to all rounds. A part whose price would be below nothing costs nothing."""
        parts = list(self._prices)
        while parts:
            found = self._solved(parts)
            if all(price >= 0 for price in found):
                break
            parts = [part for part, price in zip(parts, found, strict=True) if price >= 0]
        self._prices = dict.fromkeys(self._prices, 0.0) | dict(zip(parts, found if parts else [], strict=True))

    def _solved(self, parts: Sequence[Part]) -> list[float]:
        """Return the prices of these parts alone, by Gauss's elimination of the normal equations."""
        rows: list[list[float]] = []
        for part in parts:
            first, usual = FIRST[part[0]]
            trust = PRIOR_ROUNDS * usual**2
            row = [sum(one.square(part, other) for one in self._sums.values()) for other in parts]
            row[len(rows)] += trust
            product = sum(one.products.get(part, 0.0) for one in self._sums.values())
            rows.append([*row, product + trust * first])
        # The trust in first guesses makes every pivot greater than 0.
        for place, pivot in enumerate(rows):
            for row in rows[place + 1 :]:
                share = row[place] / pivot[place]
                row[place:] = [value - share * own for value, own in zip(row[place:], pivot[place:], strict=True)]
        found = [0.0] * len(rows)
        for place in reversed(range(len(rows))):
            *row, right = rows[place]
            known = sum(value * price for value, price in zip(row[place + 1 :], found[place + 1 :], strict=True))
            found[place] = (right - known) / row[place]
        return found

    def _note_drift(self, ratio: float) -> None:
        self._drift = smoothed(self._drift, ratio, DRIFT_MEMORY)
        if not 1 / JUMP < self._drift < JUMP:
            self._drift = 1.0
            self._means.clear()
            for one in self._sums.values():
                one.fade(TRACE)

    def _learn(self, amounts: Mapping[Part, float], took: float, expected: float) -> None:
        for part in amounts:
            self._prices.setdefault(part, FIRST[part[0]][0])
        models = frozenset(model for _, model in amounts if model)
        sums = self._sums.setdefault(models, _Sums())
        sums.fade(MEMORY)
        sums.add({part: amount for part, amount in amounts.items() if amount}, took, 1 / expected)

    def _sum(self, amounts: Mapping[Part, float]) -> float:
        return sum(self.price(*part) * amount for part, amount in amounts.items())

    def _rest(self, step_count: int) -> float:
        mean = self._means.get(step_count)
        return (mean.time - self._sum(mean.amounts)) * mean.count / (mean.count + REST_WEIGHT) if mean else 0.0


def _mean(recent: Iterable[Mapping[Part, float]]) -> dict[Part, float]:
    """Return the mean amounts of rounds."""
    total: dict[Part, float] = {}
    count = 0
    for amounts in recent:
        count += 1
        for part, amount in amounts.items():
            total[part] = total.get(part, 0.0) + amount
    return {part: amount / count for part, amount in total.items()}
