"""What the laws say of drafts: acceptance of one that was not trained, the best for a budget, and counts by batch."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import log
from statistics import fmean

from paceline.errors import InvalidRequest
from paceline.laws.fitting import Estimate, LogLinearLaw, fit
from paceline.laws.points import MOST_TOKENS, Point
from paceline.planning.speed import expected_tokens
from paceline.simulate.measured_rounds import MeasuredRounds
from paceline.simulate.saved_costs import SavedCosts

LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.0, 0.99
DECIMALS = 3
"""Of errors of acceptance by which laws are compared. Of equals the simpler one is taken."""


@dataclass(frozen=True)
class Draft:
    """A draft that may never have been trained."""

    depth: int
    token_count: float
    acceptance: Estimate


@dataclass(frozen=True)
class Choice:
    """The draft and draft count that give most at a batch size."""

    batch_size: int
    draft: Draft
    draft_count: int
    tokens_per_s: float


Quantities = Callable[[int, float], tuple[float, ...]]
"""What a law sums the logarithms of, from depth and tokens."""


def _apart(depth: int, token_count: float) -> tuple[float, ...]:
    return token_count, depth


def _together(depth: int, token_count: float) -> tuple[float, ...]:
    return token_count, depth, token_count ** log(depth)  # whose logarithm is the product of the two


def _law_of(points: Sequence[Point]) -> tuple[Quantities, LogLinearLaw]:
    """Return the law of tokens and depth, with a part for both together where that foresees points better.

    Each point is foreseen by the others; those that are held out have no say.
    """
    values = [one.acceptance for one in points]
    laws = [(_apart, fit([_apart(one.depth, one.token_count) for one in points], values))]
    with suppress(InvalidRequest):  # too few points for a number more
        laws.append((_together, fit([_together(one.depth, one.token_count) for one in points], values)))
    return min(laws, key=lambda one: round(one[1].left_out_error, DECIMALS))


class DraftLaws:
    """Laws of acceptance, of training time and of drafting time."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Raise InvalidRequest where points are too few, or too alike, for the law of acceptance."""
        self.used = [one for one in points if not one.held_out]
        self.held_out = [one for one in points if one.held_out]
        if not self.used:
            raise InvalidRequest("there are no points, or all of them are held out; give some that laws may learn from")
        self._quantities, self.acceptance = _law_of(self.used)
        self._token_s = _Line((one.depth, one.train_s / one.token_count) for one in self.used if one.train_s)
        self._step_s = _Line((one.depth, one.step_s) for one in self.used if one.step_s)

    @property
    def depths(self) -> list[int]:
        return sorted({one.depth for one in self.used})

    def draft(self, depth: int, token_count: float) -> Draft:
        found = self.acceptance.predict(self._quantities(depth, token_count))
        within = min(max(found.value, LEAST_ACCEPTANCE), MOST_ACCEPTANCE)
        return Draft(depth, token_count, Estimate(within, found.margin))

    def affordable(self, budget_s: float) -> list[Draft]:
        """Return the draft of each measured depth that is trained for so many seconds. Raise InvalidRequest."""
        if not self._token_s.is_known:
            raise InvalidRequest("no point has train_s, so a budget says nothing; measure the seconds of training")
        counts = {depth: budget_s / self._token_s.at(depth) for depth in self.depths}
        if (most := max(counts.values())) > MOST_TOKENS:
            raise InvalidRequest(
                f"--budget-s is {budget_s:g}, time for {most:.1g} tokens; give a budget for {MOST_TOKENS} or fewer",
                field="budget_s",
            )
        return [self.draft(depth, count) for depth, count in counts.items()]

    def step_factor(self, depth: int, measured_depth: int) -> float:
        """Return how much longer a draft's steps take than those of the measured depth; 1 if points tell no times."""
        return self._step_s.at(depth) / self._step_s.at(measured_depth) if self._step_s.is_known else 1.0


class _Line:
    """Values by depth: a part that all drafts have, and one for each layer; neither is below nothing."""

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        known = list(points)
        self.is_known = bool(known)
        if not known:
            return
        depth, value = fmean(one for one, _ in known), fmean(one for _, one in known)
        square = sum((one - depth) ** 2 for one, _ in known)
        slope = sum((one - depth) * (own - value) for one, own in known) / square if square else 0.0
        self._slope = min(max(0.0, slope), value / depth)
        self._first = value - self._slope * depth

    def at(self, depth: int) -> float:
        return self._first + self._slope * depth


class RoundTimes:
    """Seconds of rounds with drafts of any depth, from measured costs."""

    def __init__(self, saved: SavedCosts, laws: DraftLaws, measured_depth: int) -> None:
        """`measured_depth` is the depth of the draft whose costs were measured.

        Raise InvalidRequest where costs are of no draft, or of one draft count, which says nothing of others.
        """
        self._rounds = MeasuredRounds(saved)
        self._rounds.check_draft_counts()
        self.most_drafts = max(self._rounds.counts)
        self._laws = laws
        self._measured_depth = measured_depth

    def seconds(self, batch_size: int, draft_count: int, depth: int) -> float:
        """Return the time of a round of one lane: the draft works, and then the target."""
        factor = self._laws.step_factor(depth, self._measured_depth)
        drafting_s = self._rounds.draft_s(batch_size, draft_count, work_factor=factor)
        return self._rounds.verify_s(batch_size, draft_count) + drafting_s


def best_choice(drafts: Sequence[Draft], batch_size: int, times: RoundTimes) -> Choice:
    """Return what gives most tokens a second among these drafts and all counts up to the most measured."""
    choices = []
    for one, count in product(drafts, range(times.most_drafts + 1)):
        token_count = batch_size * expected_tokens(one.acceptance.value, count)
        choices.append(Choice(batch_size, one, count, token_count / times.seconds(batch_size, count, one.depth)))
    return max(choices, key=lambda one: one.tokens_per_s)
