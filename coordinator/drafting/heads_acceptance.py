"""What drafts of the target's own heads are worth: how often they are right by place, and how many they give.

Every draft is compared with the tokens of its round, used or not, so learning costs no verification.
"""

from collections.abc import Sequence

from coordinator.requests.acceptance import PlaceAcceptance
from coordinator.requests.generation import HeadsDraft
from coordinator.smoothing import smoothed

PRIOR_RATE = 0.5
"""Share of right drafts that is assumed while nothing is known. A draft service's is higher: to take to the heads too
early is noticed late, because a service that is not asked shows nothing."""
GIVEN_MEMORY = 0.9
"""Weight of earlier rows in the share of asked tokens that they give."""


class HeadsAcceptance:
    """Of all generations together."""

    def __init__(self, most: int) -> None:
        """`most` is the most tokens that they draft."""
        self._most = most
        self._places = PlaceAcceptance(most, PRIOR_RATE)
        self._given = 1.0
        """Share of the tokens that they were asked for of late which they gave."""
        self._chances: tuple[float, ...] | None = None
        """What `chances` returns until something is learned: each row asks."""

    def chances(self) -> tuple[float, ...]:
        """Return the chance that their first 1, 2, ... drafts are all right, once they are given."""
        if self._chances is None:
            self._chances = tuple(self._places.survival())
        return self._chances

    def expected_chances(self) -> tuple[float, ...]:
        """Return the same for drafts that they would be asked for."""
        return tuple([self._given * chance for chance in self.chances()]) if self._most else ()

    def age(self) -> None:
        """Let a round pass."""
        self._places.age()
        self._chances = None

    def take_in(self, drafted: HeadsDraft) -> None:
        """Learn from what they gave of what they were asked for."""
        if drafted.asked_count:
            self._given = smoothed(self._given, len(drafted.token_ids) / drafted.asked_count, GIVEN_MEMORY)

    def observe(self, token_ids: Sequence[int], committed: Sequence[int]) -> None:
        """Learn from the tokens that were committed after the drafts were made."""
        right_count, compared_count = 0, min(len(token_ids), len(committed))
        while right_count < compared_count and token_ids[right_count] == committed[right_count]:
            right_count += 1
        self._places.add(right_count, compared_count)
        self._chances = None
