"""Estimates of how often draft tokens are right, learned round by round."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TypeVar

Number = TypeVar("Number", int, float)

ROUND_MEMORY = 0.98
"""Weight of a generation's earlier rounds after one more: the last few alone show luck rather than the text."""
PRIOR_WEIGHT = 24.0
"""Weight of the prior rate, in drafts."""
PRIOR_RATE = 0.7
"""Share of right drafts that is assumed while nothing is known."""
PLACE_MEMORY = 0.998
"""Weight of earlier rounds at each place after one more round, with drafts or without."""
PLACE_PRIOR_WEIGHT = 4.0
"""Weight of the place before in the estimate of a place, in drafts."""
MOST_LIKELY = 0.99


class Acceptance:
    """Share of right drafts of one generation, at the places that were compared. Recent rounds weigh more."""

    def __init__(self) -> None:
        self._right = self._asked = 0.0

    def rate(self, usual: float) -> float:
        """Return the generation's rate. It starts at `usual`, the rate of all generations."""
        return (self._right + PRIOR_WEIGHT * usual) / (self._asked + PRIOR_WEIGHT)

    def add(self, accepted_count: int, drafted_count: int) -> None:
        """Learn from a round. Drafts after the first wrong one tell nothing."""
        if drafted_count:
            self._right = ROUND_MEMORY * self._right + accepted_count
            self._asked = ROUND_MEMORY * self._asked + min(accepted_count + 1, drafted_count)


class PlaceAcceptance:
    """Share of right drafts of all generations, by place: a first draft token is right more often than later ones."""

    def __init__(self, place_count: int, prior_rate: float = PRIOR_RATE) -> None:
        self._prior_rate = prior_rate
        # Rows by their count of right places, and of compared places; sums of these give the counts of each place.
        self._right = [0.0] * (place_count + 1)
        self._asked = [0.0] * (place_count + 1)
        self._right_sum = self._asked_sum = 0.0
        """Right and compared places of all rows."""

    @property
    def rate(self) -> float:
        """Rate over all places."""
        return (self._right_sum + PRIOR_WEIGHT * self._prior_rate) / (self._asked_sum + PRIOR_WEIGHT)

    def age(self) -> None:
        """Let a round pass: earlier rows weigh less."""
        self._right = [PLACE_MEMORY * one for one in self._right]
        self._asked = [PLACE_MEMORY * one for one in self._asked]
        self._right_sum *= PLACE_MEMORY
        self._asked_sum *= PLACE_MEMORY

    def add(self, accepted_count: int, drafted_count: int) -> None:
        asked_count = min(accepted_count + 1, drafted_count)
        self._right[accepted_count] += 1
        self._asked[asked_count] += 1
        self._right_sum += accepted_count
        self._asked_sum += asked_count

    def survival(self, likelier: float = 1.0) -> list[float]:
        """Return the chance that the first 1, 2, ... drafts are all right; `likelier` is a factor on usual rates."""
        rate, rates = self._prior_rate, []
        for right, asked in zip(by_place(self._right[1:]), by_place(self._asked[1:]), strict=True):
            # A place with few compared drafts is taken to be like the one before it.
            rate = (right + PLACE_PRIOR_WEIGHT * rate) / (asked + PLACE_PRIOR_WEIGHT)
            rates.append(min(rate * likelier, MOST_LIKELY))
        return [*accumulate(rates, mul)]


def by_place(rows: Sequence[Number]) -> tuple[Number, ...]:
    """Return how many rows came as far as each place, from how many came to the first, second, ... and no further."""
    return tuple(accumulate(reversed(rows)))[::-1]
