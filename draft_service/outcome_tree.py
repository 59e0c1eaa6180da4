"""What may come after a sequence's committed tokens: a tree of prefixes, and of guesses which of them come next.

Each place of the tree is a prefix that the draft model has computed, with its ranked tokens there. The first of them is
its choice; the others are what the target may choose instead. A guess is one token after a place. Knows nothing of
models and caches.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from paceline.engine.row_choice import RankedToken
from paceline.prefix_hash import extended_hash

LEAST_CHANCE = 0.002
"""A guess less likely than this is not worth its work."""
PRIOR_MISSES = 2.0
"""Misses that were as many as expected, before any were seen."""
PRIOR_PLACES = 8.0
"""Places that these were among."""
RATIO_MEMORY = 0.98
"""Weight of earlier places after one more."""


@dataclass(eq=False, slots=True)
class Place:
    length: int
    """Tokens of the prefix."""
    hash: int
    """`PrefixHash` of the prefix."""
    branch_id: str
    """Cached sequence that begins with the prefix."""
    ranked: Sequence[RankedToken]
    """Likeliest next tokens, the draft's choice first; empty where it has none."""
    chance: float
    """Estimate that the sequence comes through here."""
    children: "dict[int, Place]" = field(default_factory=dict)
    """Computed places one token further."""

    def below(self) -> "Iterator[Place]":
        """Return this place and all that follow it."""
        pending = [self]
        while pending:
            place = pending.pop()
            yield place
            pending += place.children.values()


@dataclass(frozen=True, slots=True)
class Guess:
    parent: Place
    token_id: int
    chance: float


class Misses:
    """How often the target differs from the draft's choice, as measured."""

    def __init__(self) -> None:
        self._expected = self._seen = PRIOR_MISSES
        self._places = PRIOR_PLACES

    @property
    def ratio(self) -> float:
        """How much more often than the draft's scores say."""
        return self._seen / self._expected

    @property
    def run(self) -> float:
        """How many of the draft's choices in a row are worth computing, in the mean: up to one that is missed."""
        return self._places / max(self._seen, 1.0)

    def add(self, expected: float, is_missed: bool) -> None:
        """Note a place where the target's choice came, and the chance that it would differ."""
        self._expected = RATIO_MEMORY * self._expected + expected
        self._seen = RATIO_MEMORY * self._seen + is_missed
        self._places = RATIO_MEMORY * self._places + 1


class OutcomeTree:
    def __init__(self, limit: int, misses: Misses) -> None:
        """`limit` is the most places it may have below its root."""
        self.limit = limit
        self.misses = misses
        self.root: Place | None = None
        self._size = 0
        self._guesses: list[tuple[float, int, Guess]] = []
        """A heap, the likeliest first."""
        self._order = count()

    @property
    def best_chance(self) -> float:
        """Chance of the likeliest guess that is left; 0 for none."""
        is_done = not self._guesses or self._size >= self.limit
        return 0.0 if is_done else -self._guesses[0][0]

    @property
    def room(self) -> int:
        """How many places it may still get."""
        return self.limit - self._size

    def pop(self) -> Guess:
        """Take out the likeliest guess."""
        return heapq.heappop(self._guesses)[2]

    def push(self, guess: Guess) -> None:
        heapq.heappush(self._guesses, (-guess.chance, next(self._order), guess))

    def grow(
        self, parent: Place, token_ids: Sequence[int], branch_id: str, ranked: Sequence[Sequence[RankedToken]]
    ) -> Place:
        """Add a place for each token, one after the other, with its ranked tokens; return the last."""
        made = [parent]
        for token_id, tokens in zip(token_ids, ranked, strict=True):
            made.append(self._child(made[-1], token_id, branch_id, tokens))
        for place in made[1:]:
            self._take_in(place)
        return made[-1]

    def move_root(self, root: Place) -> None:
        """Make a place the root: what does not follow it has not come."""
        self.root, self._size, self._guesses = root, -1, []
        scale = 1 / root.chance
        for place in root.below():
            place.chance *= scale
            self._take_in(place)

    def find(self, token_ids: Sequence[int]) -> Place | None:
        """Return the place that these tokens after the root lead to, if it was computed."""
        place = self.root
        for token_id in token_ids:
            place = place.children.get(token_id) if place else None
        return place

    def learn(self, token_ids: Sequence[int]) -> None:
        """Compare the tokens that came after the root with the draft's choices."""
        place = self.root
        for token_id in token_ids:
            if place is None or not place.ranked:
                return
            choice = place.ranked[0]
            self.misses.add(1 - choice.probability, token_id != choice.token_id)
            place = place.children.get(token_id)

    def _take_in(self, place: Place) -> None:
        self._size += 1
        for rank, token in enumerate(place.ranked):
            chance = place.chance * self._share(place, rank)
            # Chances change with the root alone, and then all guesses are made anew.
            if chance < LEAST_CHANCE:
                if rank:
                    return  # those after it are as unlikely
            elif token.token_id not in place.children:
                self.push(Guess(place, token.token_id, chance))

    def _child(self, parent: Place, token_id: int, branch_id: str, ranked: Sequence[RankedToken]) -> Place:
        value = extended_hash(parent.hash, (token_id,))
        rank = next((rank for rank, one in enumerate(parent.ranked) if one.token_id == token_id), None)
        place = Place(parent.length + 1, value, branch_id, ranked, parent.chance * self._share(parent, rank))
        parent.children[token_id] = place
        return place

    def _share(self, place: Place, rank: int | None) -> float:
        """Return the chance that a token comes after a place, by the draft's scores and what came of earlier ones.

        It is the one of this rank there; None is one that is not ranked.
        """
        misses, probability = self.misses.ratio, LEAST_CHANCE if rank is None else place.ranked[rank].probability
        return max(LEAST_CHANCE, 1 - misses * (1 - probability)) if rank == 0 else min(1.0, misses * probability)


def drafts_after(place: Place, most: int) -> tuple[tuple[int, ...], Place]:
    """Return at most `most` draft tokens after a place, and the place that the last of them follows."""
    drafts: list[int] = []
    following: Place | None = place
    while following and following.ranked and len(drafts) < most:
        place = following
        drafts.append(place.ranked[0].token_id)
        following = place.children.get(drafts[-1])
    return tuple(drafts), place
