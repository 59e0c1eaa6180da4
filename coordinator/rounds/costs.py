"""What the parts of a round cost, learned from the times of whole rounds.

Owns seconds only; knows nothing of acceptance. A round's time is that of its whole cycle, so the cost of a part
includes every effect it has: lanes that overlap, cores that two models want. The time is taken as a sum of parts, each
with a price that is not negative; prices are fitted by weighted least squares which forget. What a sum of parts cannot
show, such as steps in the time of a pass, is kept beside it, by the draft count.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.rounds.round_report import DraftCall, RoundReport
from coordinator.smoothing import smoothed

MEMORY = 0.996
"""Weight of earlier rounds in the prices after one more."""
PRIOR_ROUNDS = 3.0
"""Weight of the first guess of a price, in rounds that have a usual amount of its part."""
SWEEPS = 12
"""Passes over the prices of one fit, which begins with the prices of the last one."""
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
REST_MOST = 200.0
"""Rounds that such a remainder remembers."""

BENDS = (16, 64)
"""Tokens of a verify from which each costs more: a model reads its weights for few tokens as for one."""

CONSTANT, DRAFTED, PROMPT = "constant", "drafted", "prompt"
OVER = tuple(f"over {bend}" for bend in BENDS)
CALL, STEP, TOKEN, CAUGHT_UP = "call", "step", "token", "caught up"
DECODING = {CONSTANT, DRAFTED, *OVER, CALL, STEP, TOKEN}
"""Parts of rounds that bring no prompt."""

FIRST = {
    CONSTANT: (1.0, 1.0),
    DRAFTED: (0.02, 8.0),
    OVER[0]: (0.0, 8.0),
    OVER[1]: (0.0, 32.0),
    PROMPT: (0.01, 20.0),
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

    @staticmethod
    def of(report: RoundReport) -> "RoundWork":
        row_count = len(report.rows)
        drafted_count = max(0, report.verified_count - row_count - report.prompt_token_count)
        return RoundWork(row_count, drafted_count, report.prompt_token_count, report.draft_calls)

    def amounts(self) -> dict[Part, float]:
        amounts: dict[Part, float] = {
            (CONSTANT, ""): 1.0,
            (DRAFTED, ""): self.drafted_count,
            (PROMPT, ""): self.prompt_count,
        }
        for part, bend in zip(OVER, BENDS, strict=True):
            amounts[part, ""] = max(0, self.row_count + self.drafted_count - bend)
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


class RoundCosts:
    """Prices of the parts of rounds with groups of about one size. Times are multiples of a unit."""

    def __init__(self, lanes: int) -> None:
        self._recent: deque[dict[Part, float]] = deque(maxlen=lanes)
        """Amounts of the latest rounds of all lanes: the round of another lane takes its time from this one's."""
        self.unit_s = 0.0
        """Seconds of the unit, about a plain round's; 0 before any round."""
        self._prices: dict[Part, float] = {}
        self._squares: dict[Part, dict[Part, float]] = {}
        self._products: dict[Part, float] = {}
        self._rests: dict[int, tuple[float, float]] = {}
        """By draft count: the mean of what a fit leaves of its rounds' times, and how many rounds that is of."""
        self._round_counts: dict[int, int] = {}
        self._drift = 1.0
        """Mean of the latest times over what was expected of them."""

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

    def drafted_price(self, bend_count: int) -> float:
        """Return the price of one more draft token in a verify that is beyond so many bends."""
        return self.price(DRAFTED) + sum(self.price(part) for part in OVER[:bend_count])

    def predict(self, work: RoundWork) -> float:
        """Return the time of a round with this work."""
        return max(LEAST, self._sum(work.amounts()) + self._rest(work.step_count))

    def step_price(self, model: str, step_count: int) -> float:
        """Return the time of a call for so many tokens a row beside that of no call, without what rows add."""
        fitted = self.price(CALL, model) + self.price(STEP, model) * step_count
        return max(0.0, fitted + self._rest(step_count) - self._rest(0))

    def add(self, work: RoundWork, cycle_s: float) -> None:
        amounts = work.amounts()
        self._recent.append(amounts)
        mean = _mean(self._recent)
        self.unit_s = self.unit_s or cycle_s / self._sum(mean)
        expected = max(LEAST, self._sum(mean) + self._rest(work.step_count))
        took = cycle_s / self.unit_s
        if all(part in DECODING or not amount for (part, _), amount in mean.items()):
            took = min(took, LONGEST * expected)
            self._note_rest(work.step_count, took - self._sum(mean))
            if self._rests[work.step_count][1] > REST_WEIGHT:  # what is hardly known says nothing of a change
                self._note_drift(took / expected)
        self._learn(mean, took, expected)
        self._round_counts[work.step_count] = self.round_count(work.step_count) + 1

    def fit(self) -> None:
        """Fit the prices to all rounds: coordinate by coordinate, and never below nothing."""
        for _ in range(SWEEPS):
            for part, row in self._squares.items():
                first, usual = FIRST[part[0]]
                trust = PRIOR_ROUNDS * usual**2
                others = sum(value * self._prices[other] for other, value in row.items() if other != part)
                square = row.get(part, 0.0) + trust
                self._prices[part] = max(0.0, (self._products[part] + trust * first - others) / square)

    def _note_drift(self, ratio: float) -> None:
        self._drift = smoothed(self._drift, ratio, DRIFT_MEMORY)
        if not 1 / JUMP < self._drift < JUMP:
            self._drift = 1.0
            self._rests.clear()
            self._products = {part: TRACE * value for part, value in self._products.items()}
            for row in self._squares.values():
                row.update({part: TRACE * value for part, value in row.items()})

    def _learn(self, amounts: Mapping[Part, float], took: float, expected: float) -> None:
        weight = 1 / expected
        for part in amounts:
            if part not in self._prices:
                self._prices[part] = FIRST[part[0]][0]
                self._squares[part], self._products[part] = {}, 0.0
        for part, row in self._squares.items():
            amount = amounts.get(part, 0.0)
            self._products[part] = MEMORY * self._products[part] + weight * amount * took
            for other in row:
                row[other] *= MEMORY
            if amount:
                for other, value in amounts.items():
                    if value:
                        row[other] = row.get(other, 0.0) + weight * amount * value

    def _sum(self, amounts: Mapping[Part, float]) -> float:
        return sum(self.price(*part) * amount for part, amount in amounts.items())

    def _rest(self, step_count: int) -> float:
        mean, count = self._rests.get(step_count, (0.0, 0.0))
        return mean * count / (count + REST_WEIGHT)

    def _note_rest(self, step_count: int, rest: float) -> None:
        mean, count = self._rests.get(step_count, (0.0, 0.0))
        count = min(count + 1, REST_MOST)
        self._rests[step_count] = mean + (rest - mean) / count, count


def _mean(recent: Iterable[Mapping[Part, float]]) -> dict[Part, float]:
    """Return the mean amounts of rounds."""
    total: dict[Part, float] = {}
    count = 0
    for amounts in recent:
        count += 1
        for part, amount in amounts.items():
            total[part] = total.get(part, 0.0) + amount
    return {part: amount / count for part, amount in total.items()}
