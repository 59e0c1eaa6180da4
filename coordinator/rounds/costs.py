"""What the parts of a round cost, learned from the times of whole rounds.

Owns seconds only; knows nothing of acceptance. A round's time is that of its whole cycle (see `DraftPlanner.observe`),
so the cost of a part includes every effect it has: lanes that overlap, cores that two models want. The time is taken as
a sum of parts, each with a price that is not negative; prices are fitted by weighted least squares which forget. What a
sum of parts cannot show, such as steps in the time of a pass, is kept beside it, by the draft count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import sqrt
from operator import add, mul, sub

from coordinator.rounds.least_squares import FadingSums
from coordinator.rounds.round_report import DraftCall, RoundReport, RowReport
from coordinator.rounds.sources import MOST_MODELS
from coordinator.smoothing import smoothed

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
FIRST_VARIANCE = 0.1
"""Variance of the first rounds' times: a plain round varies by a third."""
VARIANCE_MEMORY = 0.98
REST_WEIGHT = 8.0
"""Rounds of one draft count after which half of what remains for it is believed."""
KNOWN = 24.0
"""Rounds of one draft count after which a change of its times is one of the machine."""
REST_MOST = 200.0
"""Rounds that such a remainder remembers."""

BENDS = (16, 64)
"""Tokens of a verify from which each costs more: a model reads its weights for few tokens as for one."""

CONSTANT, DRAFTED, PROMPT, CACHED = "constant", "drafted", "prompt", "cached"
HEADS_CALL, HEADS = "heads call", "heads"
OVER = tuple(f"over {bend}" for bend in BENDS)
CALL, STEP, TOKEN, CAUGHT_UP = "call", "step", "token", "caught up"
TARGET_PARTS = (CONSTANT, DRAFTED, PROMPT, *OVER, CACHED, HEADS_CALL, HEADS)
CALL_PARTS = (CALL, STEP, TOKEN, CAUGHT_UP)
"""Parts of the target's own work, and of a call for drafts."""
_TARGET_PLACES = {part: place for place, part in enumerate(TARGET_PARTS)}
_CALL_PLACES = {part: place for place, part in enumerate(CALL_PARTS)}

FIRST = {
    CONSTANT: (1.0, 1.0),
    DRAFTED: (0.02, 8.0),
    OVER[0]: (0.0, 8.0),
    OVER[1]: (0.0, 32.0),
    PROMPT: (0.01, 20.0),
    CACHED: (0.0, 1000.0),
    HEADS_CALL: (0.1, 1.0),
    HEADS: (0.01, 8.0),
    CALL: (0.2, 1.0),
    STEP: (0.05, 4.0),
    TOKEN: (0.002, 16.0),
    CAUGHT_UP: (0.005, 20.0),
}
"""For each part: its first price, as a share of a plain round's time, and its usual amount."""
FIRST_CALL_PRICES = [FIRST[part][0] for part in CALL_PARTS]


@dataclass(slots=True)
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
    heads_call_count: int = 0
    """Passes after which they draft: reading them takes time whatever they draft."""
    cached_count: int = 0
    """Tokens of the rows' texts, which the target has cached: a verify attends to all of them."""
    further: "Sequence[RoundWork]" = ()
    """The target's work of further rounds in the same call."""
    committed_count: int = 0
    """Tokens that it brought."""

    @staticmethod
    def of(report: RoundReport) -> "RoundWork":
        return RoundWork(
            *_verified(report.rows),
            report.prompt_token_count,
            report.draft_calls,
            report.heads_count,
            report.pass_count if report.heads_count else 0,
            _cached_count(report.rows),
            [
                *(RoundWork(*_verified(rows), cached_count=_cached_count(rows)) for rows in report.further),
                # What followed the ends of all outputs took a pass's time.
                *(RoundWork(0) for _ in range(report.pass_count - 1 - len(report.further))),
            ],
            sum([row.committed_count for row in report.all_rows]),
        )

    def target_amounts(self) -> list[float]:
        """Return the amounts of `TARGET_PARTS`."""
        token_count = self.row_count + self.drafted_count
        over = [max(0, token_count - bend) for bend in BENDS]
        heads = self.heads_call_count, self.heads_count
        amounts = [1.0, self.drafted_count, self.prompt_count, *over, self.cached_count, *heads]
        for one in self.further:
            amounts = [*map(add, amounts, one.target_amounts())]
        return amounts

    @property
    def step_count(self) -> int:
        calls = self.draft_calls
        return max([call.step_count for call in calls.values()]) if calls else 0


def _verified(rows: Sequence[RowReport]) -> tuple[int, int]:
    """Return how many rows a verify had, and how many drafts."""
    return len(rows), sum([row.drafted_count for row in rows])


def _cached_count(rows: Sequence[RowReport]) -> int:
    return sum([len(row.generation.token_ids) for row in rows if row.generation])


@dataclass
class _Mean:
    """Mean time and amounts of rounds with one draft count."""

    count: float = 0.0
    """Rounds that it is of."""
    time: float = 0.0
    amounts: list[float] = field(default_factory=list)

    def add(self, amounts: Sequence[float], took: float) -> None:
        self.count = min(self.count + 1, REST_MOST)
        self.time += (took - self.time) / self.count
        pairs = zip_longest(self.amounts, amounts, fillvalue=0.0)
        self.amounts = [before + (amount - before) / self.count for before, amount in pairs]


class RoundCosts:
    """Prices of the parts of rounds with groups of about one size. Times are multiples of a unit."""

    def __init__(self) -> None:
        self._prices = [FIRST[part][0] for part in TARGET_PARTS]
        """Those of the target's parts, then of the parts of calls for each draft model; amounts have the same order."""
        self._call_places: dict[str, int] = {}
        """Where the parts of calls begin, by draft model that was asked; those asked last at the end."""
        self.unit_s = 0.0
        """Seconds of the unit, about a plain round's; 0 before any round."""
        self._sums: dict[frozenset[str], FadingSums] = {}
        """By the models that rounds asked. Each forgets only as it learns: one way may be out of use for long."""
        self._learned: set[frozenset[str]] = set()
        """Of those, the ones that grew since the last time that all was forgotten."""
        self._is_fitted = True
        """Whether the prices are those of the sums."""
        self._means: dict[int, _Mean] = {}
        """By draft count: what a fit leaves of the mean time is kept beside it."""
        self._round_counts: dict[int, int] = {}
        self._doubts: dict[tuple[float, ...], float] = {}
        """Of the amounts that were asked about since the last fit: to work one out takes as long as a fit."""
        self._variance = FIRST_VARIANCE
        """Of the latest times, for each unit that was expected of them."""
        self._drift = 1.0
        """Mean of the latest times over what was expected of them."""
        self._beside: Sequence[float] = []
        """Mean amounts of the rounds of other sizes that ran beside the latest one."""
        self.pass_count = 1.0
        """Mean passes of the latest rounds of this size: what ran beside them is shared among these."""
        self.share = 1.0
        """Of the rounds of a cycle, those of this size: what is one's own is so much of it."""
        self._waited_shares: dict[str, float] = {}
        """By draft model, what rounds wait for of their calls, in the mean of late: less than 1 where drafts are
        prepared."""

    def as_guess(self) -> "RoundCosts":
        """Return costs that begin with these, and soon follow what they learn themselves."""
        guess = RoundCosts()
        guess.unit_s, guess._prices, guess._call_places = self.unit_s, [*self._prices], {**self._call_places}
        guess._variance, guess._waited_shares = self._variance, {**self._waited_shares}
        guess._fade_to(TRACE, self._sums)
        return guess

    def forget(self) -> None:
        """Keep of what was measured a guess alone, which soon follows what is measured now.

        What nothing was added to since the last time is a guess already.
        """
        self._drift = 1.0
        self._means.clear()
        self._fade_to(TRACE, {models: self._sums[models] for models in self._learned})
        self._learned.clear()

    @property
    def models(self) -> list[str]:
        """Models of draft services that were asked."""
        return [*self._call_places]

    def round_count(self, step_count: int) -> int:
        """Return how many rounds with this many steps were seen."""
        return self._round_counts.get(step_count, 0)

    def price(self, part: str, model: str = "") -> float:
        """Return the price of one unit of a part, in each round of this size."""
        if part in _CALL_PLACES:
            # Nothing is prepared for a row of which the service lacks tokens: a round waits for all that it takes in.
            waited = 1.0 if part == CAUGHT_UP else self._waited_shares.get(model, 1.0)
            return self.share * waited * self._call_prices(model)[_CALL_PLACES[part]]
        return self.share * self._prices[_TARGET_PLACES[part]]

    def drafted_price(self, bend_count: float) -> float:
        """Return the price of one more draft token in a verify that is beyond so many bends, or beyond part of one."""
        price = self.price(DRAFTED)
        for place, part in enumerate(OVER):
            price += min(1.0, max(0.0, bend_count - place)) * self.price(part)
        return price

    def predict(self, work: RoundWork) -> float:
        """Return the time of a round with this work."""
        amounts = work.target_amounts()
        time, passes = self._sum(amounts), amounts[_TARGET_PLACES[CONSTANT]] / self.pass_count
        for model, call in (work.draft_calls or {}).items():
            time += self._waited_shares.get(model, 1.0) * self._call_time(model, call)
        time = self.share * time + (1 - self.share) * passes * self._sum(self._beside)
        return max(LEAST, time + self._rest(work.step_count))

    def doubt(self, work: RoundWork, beside: RoundWork) -> float:
        """Return the standard error of the time by which the target's work is longer than that `beside` it."""
        more = (*map(sub, work.target_amounts(), beside.target_amounts()),)
        if more not in self._doubts:
            amounts = [*more, *[0.0] * (len(self._prices) - len(more))]
            self._doubts[more] = sqrt(self._variance * self._all_sums().variance(amounts))
        return self.share * self._doubts[more]

    def catching_up(self, work: RoundWork) -> float:
        """Return the time in which draft services take in what they had missed."""
        return sum(
            self.price(CAUGHT_UP, model) * call.caught_up_count for model, call in (work.draft_calls or {}).items()
        )

    def add(self, works: Sequence[RoundWork], cycle_s: float, beside: Sequence[RoundWork] = ()) -> None:
        """Learn from the last of these rounds, whose cycle took so long.

        The others ran in it too, in other lanes; those `beside` had groups of other sizes.
        """
        self._give_places(dict.fromkeys(model for one in (*beside, *works) for model in one.draft_calls or ()))
        self._note_waits(works[-1].draft_calls or {})
        own, others = [*map(self._amounts, works)], [*map(self._amounts, beside)]
        self._beside, self.share = _mean(others), len(works) / (len(works) + len(others))
        self.pass_count = _mean(own)[_TARGET_PLACES[CONSTANT]]
        work, mean = works[-1], _mean([*others, *own])
        foreseen = self._sum(mean)
        self.unit_s = self.unit_s or cycle_s / foreseen
        expected = max(LEAST, foreseen + self._rest(work.step_count))
        took = cycle_s / self.unit_s
        if not self._has_prompt(mean):
            took = min(took, LONGEST * expected)
            self._variance = smoothed(self._variance, (took - expected) ** 2 / expected, VARIANCE_MEMORY)
            known = self._means.setdefault(work.step_count, _Mean())
            known.add(mean, took)
            if known.count > KNOWN:  # what is hardly known says nothing of a change
                self._note_drift(took / expected)
        self._learn(mean, took, expected)
        self._round_counts[work.step_count] = self.round_count(work.step_count) + 1

    def fit(self) -> None:
        """Fit the prices to all rounds. A part whose price would be below nothing costs nothing."""
        if self._is_fitted:
            return
        sums, places = self._all_sums(), list(range(len(self._prices)))
        while min(found := sums.fitted(places), default=0.0) < 0:
            places = [place for place, price in zip(places, found, strict=True) if price >= 0]
        self._doubts.clear()
        self._prices = [0.0] * len(self._prices)
        for place, price in zip(places, found, strict=True):
            self._prices[place] = price
        self._is_fitted = True

    def _all_sums(self) -> FadingSums:
        """Return the sums of all rounds, and of the first guesses, which count as some more."""
        found = FadingSums()
        for place, part in enumerate([*TARGET_PARTS, *CALL_PARTS * len(self._call_places)]):
            first, usual = FIRST[part]
            trust = PRIOR_ROUNDS * usual**2
            found.squares.append([0.0] * place + [trust])
            found.products.append(trust * first)
        for one in self._sums.values():
            found.add_all(one)
        return found

    def _amounts(self, work: RoundWork) -> list[float]:
        """Return the amounts of a round that was seen, but for calls of models that have no place."""
        amounts = work.target_amounts()
        amounts += [0.0] * (len(self._prices) - len(amounts))
        for model, call in (work.draft_calls or {}).items():
            if (place := self._call_places.get(model)) is not None:
                waited = self._waited_share(model, call)
                amounts[place : place + len(CALL_PARTS)] = [waited * one for one in _call_amounts(call)]
        return amounts

    def _note_waits(self, calls: Mapping[str, DraftCall]) -> None:
        for model in calls.keys() & self._call_places:
            waited, before = self._waited_share(model, calls[model]), self._waited_shares.get(model, 1.0)
            self._waited_shares[model] = smoothed(before, waited)

    def _waited_share(self, model: str, call: DraftCall) -> float:
        """Return what a round waited for of a call's time; the rest went on in the background."""
        if call.prepared_wait_s is None:
            return 1.0
        whole_s = self.unit_s * self._call_time(model, call)
        return min(1.0, call.prepared_wait_s / whole_s) if whole_s else 0.0

    def _give_places(self, models: Collection[str]) -> None:
        """Give places to the models that are asked now, as far as there are any: none loses its own to another."""
        for model in sorted(models, key=self._call_places.__contains__, reverse=True):
            if (place := self._place_of(model, models)) is not None:
                self._call_places[model] = place

    def _place_of(self, model: str, asked: Collection[str]) -> int | None:
        """Return where the parts of a model's calls begin; a new one may take the place of that asked longest ago."""
        if (place := self._call_places.pop(model, None)) is not None:
            return place
        if len(self._call_places) < MOST_MODELS:
            self._prices += FIRST_CALL_PRICES
            return len(self._prices) - len(CALL_PARTS)
        if (oldest := next(iter(self._call_places))) in asked:
            return None
        place = self._call_places.pop(oldest)
        self._waited_shares.pop(oldest, None)
        self._prices[place : place + len(CALL_PARTS)] = FIRST_CALL_PRICES
        self._sums = {models: one for models, one in self._sums.items() if oldest not in models}
        self._learned &= self._sums.keys()
        self._means.clear()
        return place

    def _has_prompt(self, amounts: Sequence[float]) -> bool:
        """Return whether a service took in anything that it lacked."""
        missed = [amounts[place + _CALL_PLACES[CAUGHT_UP]] for place in self._call_places.values()]
        return any(missed) or amounts[_TARGET_PLACES[PROMPT]] > 0

    def _call_prices(self, model: str) -> list[float]:
        """Return the prices of `CALL_PARTS`."""
        place = self._call_places.get(model)
        return FIRST_CALL_PRICES if place is None else self._prices[place : place + len(CALL_PARTS)]

    def _call_time(self, model: str, call: DraftCall) -> float:
        """Return the time of a call that a round waits for."""
        time: float = sum(map(mul, self._call_prices(model), _call_amounts(call)))
        return time

    def _note_drift(self, ratio: float) -> None:
        self._drift = smoothed(self._drift, ratio, DRIFT_MEMORY)
        if not 1 / JUMP < self._drift < JUMP:
            self.forget()

    def _fade_to(self, share: float, sums: Mapping[frozenset[str], FadingSums]) -> None:
        self._sums |= {models: one.faded(share) for models, one in sums.items()}
        self._is_fitted = False

    def _learn(self, amounts: Sequence[float], took: float, expected: float) -> None:
        models = frozenset([model for model, place in self._call_places.items() if amounts[place]])
        self._sums.setdefault(models, FadingSums()).add(amounts, took, 1 / expected)
        self._learned.add(models)
        self._is_fitted = False

    def _sum(self, amounts: Iterable[float]) -> float:
        time: float = sum(map(mul, self._prices, amounts))
        return time

    def _rest(self, step_count: int) -> float:
        mean = self._means.get(step_count)
        return (mean.time - self._sum(mean.amounts)) * mean.count / (mean.count + REST_WEIGHT) if mean else 0.0


def _call_amounts(call: DraftCall) -> tuple[float, ...]:
    """Return the amounts of `CALL_PARTS`."""
    return 1.0, call.step_count, call.token_count, call.caught_up_count


def _mean(rounds: Sequence[Sequence[float]]) -> Sequence[float]:
    """Return the mean amounts of rounds; earlier ones may lack the last parts."""
    if len(rounds) == 1:
        return rounds[0]
    return [sum(amounts) / len(rounds) for amounts in zip_longest(*rounds, fillvalue=0.0)]
