"""What a guess is worth: the chance that its tokens are right, learned from what was committed.

Every guess is compared with the tokens of its round, used or not, so learning costs no drafts. One calibration serves
all generations of a coordinator, for one kind of source. Knows nothing of rounds.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

from coordinator.requests.acceptance import MOST_LIKELY
from coordinator.requests.guess import Guess

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)
"""The classes of agreement, each by its least: tokens of the match and of the guess that stand before a token."""
SHARE_CLASSES = 4
"""Classes of shares below 1; a share of 1 is a class of its own."""
MEMORY = 0.998
"""Weight of a class's earlier tokens after one more: about the last 500 count."""
PRIOR_WEIGHT = 12.0
"""Weight of the prior chance of a class, in tokens."""
PRIOR_CHANCES = (0.3, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.85, 0.9, 0.95)
"""Chance by agreement while nothing is known, for a share of 1; times the share for others."""

_FIRST_CLASSES = [(SHARE_CLASSES + 1) * (bisect_right(LENGTHS, length) - 1) for length in range(LENGTHS[-1] + 1)]
"""The class of the lowest shares, by agreement."""


class Calibration:
    """Learned shares of right tokens by class, in 10 classes of agreement and 5 of shares."""

    def __init__(self) -> None:
        self._chances = [
            chance * min((share_class + 0.5) / SHARE_CLASSES, 1.0)
            for chance in PRIOR_CHANCES
            for share_class in range(SHARE_CLASSES + 1)
        ]
        self._weights = [PRIOR_WEIGHT] * len(self._chances)
        self._believed = [min(one, MOST_LIKELY) for one in self._chances]
        """The same chances, none of them certain."""
        self._known: dict[tuple[int, tuple[float, ...]], tuple[float, ...]] = {}
        """The chances of guesses, by what tells their classes, since something was learned last."""

    def chances(self, guess: Guess) -> tuple[float, ...]:
        """Return for each token the chance that it and all before it are right."""
        kind = _kind_of(guess)
        if kind not in self._known:
            self._known[kind] = self._reached(_classes(*kind))
        return self._known[kind]

    def _reached(self, classes: Sequence[int]) -> tuple[float, ...]:
        return tuple(accumulate(map(self._believed.__getitem__, classes), mul))

    def observe(self, guess: Guess, committed: Sequence[int]) -> None:
        """Learn from the tokens that were committed after the guess was made.

        Tokens after the first wrong one, and after the last committed one, tell nothing.
        """
        if self._known:
            self._known = {}
        chances, weights, believed = self._chances, self._weights, self._believed
        classes = _classes(*_kind_of(guess))
        for token_id, number, right_id in zip(guess.token_ids, classes, committed, strict=False):
            is_right = token_id == right_id
            weight = weights[number] = MEMORY * weights[number] + 1
            chance = chances[number] = chances[number] + (is_right - chances[number]) / weight
            believed[number] = min(chance, MOST_LIKELY)
            if not is_right:
                break


def _kind_of(guess: Guess) -> tuple[int, tuple[float, ...]]:
    """Return what tells the classes of a guess's tokens."""
    # A longer match is of the last class too. It grows as it is followed, and would be kept once more each time.
    return min(guess.match_length, LENGTHS[-1]), guess.shares


@lru_cache(maxsize=4096)
def _classes(match_length: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Return the class of each token of a guess: so many tokens of match and guess stand before it."""
    most = LENGTHS[-1]
    return tuple(
        _FIRST_CLASSES[min(agreement, most)] + int(share * SHARE_CLASSES)
        for agreement, share in enumerate(shares, match_length)
    )
