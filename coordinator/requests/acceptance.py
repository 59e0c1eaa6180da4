"""How often the draft is right, estimated as rounds go by."""

from itertools import accumulate

ROUND_MEMORY = 0.98
"""Weight of a generation's earlier rounds after one more: the last few alone tell more of luck than of the text."""
PRIOR_WEIGHT = 24.0
"""Drafts that the prior rate counts for."""
PRIOR_RATE = 0.7
"""Taken to be so often right while nothing is known."""
PLACE_MEMORY = 0.998
"""Weight of earlier rounds in what is known of each place, after one more round, with drafts or without."""
PLACE_PRIOR_WEIGHT = 4.0
"""Drafts at a place that the place before it counts for."""
MOST_LIKELY = 0.99


class Acceptance:
    """Of one generation: share of right drafts at the places the draft was asked about, recent rounds first."""

    def __init__(self) -> None:
        self._right = self._asked = 0.0

    def rate(self, usual: float) -> float:
        """As far as the generation has shown it; `usual`: the rate of all, which holds until then."""
        return (self._right + PRIOR_WEIGHT * usual) / (self._asked + PRIOR_WEIGHT)

    def add(self, accepted_count: int, drafted_count: int) -> None:
        """Learn from a round. What lies after the first wrong draft tells nothing."""
        if drafted_count:
            self._right = ROUND_MEMORY * self._right + accepted_count
            self._asked = ROUND_MEMORY * self._asked + min(accepted_count + 1, drafted_count)


class PlaceAcceptance:
    """Of all generations, for each place of a draft: the first is right more often than what is built on it."""

    def __init__(self, place_count: int) -> None:
        # Rows by how many of their places were right, and were asked about: sums of these tell of each place.
        self._right = [0.0] * (place_count + 1)
        self._asked = [0.0] * (place_count + 1)

    @property
    def rate(self) -> float:
        """Over all places."""
        right, asked = sum(self._places(self._right)), sum(self._places(self._asked))
        return (right + PRIOR_WEIGHT * PRIOR_RATE) / (asked + PRIOR_WEIGHT)

    def age(self) -> None:
        """A round has passed."""
        self._right = [PLACE_MEMORY * one for one in self._right]
        self._asked = [PLACE_MEMORY * one for one in self._asked]

    def add(self, accepted_count: int, drafted_count: int) -> None:
        """Learn from a row."""
        self._right[accepted_count] += 1
        self._asked[min(accepted_count + 1, drafted_count)] += 1

    def expected_tokens(self, likelier: float = 1.0) -> list[float]:
        """Tokens of a row in a round with 0 drafts, 1, and so on, where one is so much likelier right than usual."""
        rate, reached, tokens = PRIOR_RATE, 1.0, [1.0]
        for right, asked in zip(self._places(self._right), self._places(self._asked), strict=True):
            # A place that was hardly asked about is taken to be like the one before it.
            rate = (right + PLACE_PRIOR_WEIGHT * rate) / (asked + PLACE_PRIOR_WEIGHT)
            reached *= min(rate * likelier, MOST_LIKELY)
            tokens.append(tokens[-1] + reached)
        return tokens

    @staticmethod
    def _places(rows: list[float]) -> list[float]:
        """Rows that came as far as each place."""
        return list(accumulate(reversed(rows[1:])))[::-1]
