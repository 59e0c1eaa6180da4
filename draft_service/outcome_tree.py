"""What may come after a sequence's committed tokens: a tree of prefixes, and of guesses which of them come next.

Each place of the tree is a prefix that the draft model has computed, with its ranked tokens there. The first of them is
its choice; the others are what the target may choose instead. A guess is one token after a place. Knows nothing of
models and caches.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from paceline.engine.sampling import RankedToken
from paceline.prefix_hash import extended_hash

LEAST_CHANCE = 0.002
"""A guess less likely than this is not worth its work."""


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


class OutcomeTree:
    def __init__(self, limit: int) -> None:
        """`limit` is the most places it may have below its root."""
        self.limit = limit
        self.root: Place | None = None
        self._size = 0
        self._guesses: list[tuple[float, int, Guess]] = []
        """A heap, the likeliest first."""
        self._order = count()

    @property
    def best_chance(self) -> float:
        """Chance of the likeliest guess; 0 when none is worth its work."""
        is_done = not self._guesses or self._size >= self.limit
        chance = 0.0 if is_done else -self._guesses[0][0]
        return chance if chance >= LEAST_CHANCE else 0.0

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
            made.append(_child(made[-1], token_id, branch_id, tokens))
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

    def _take_in(self, place: Place) -> None:
        self._size += 1
        for token in place.ranked:
            if token.token_id not in place.children:
                self.push(Guess(place, token.token_id, place.chance * token.probability))


def drafts_after(place: Place, most: int) -> tuple[tuple[int, ...], Place]:
    """Return at most `most` draft tokens after a place, and the place that the last of them follows."""
    drafts: list[int] = []
    following: Place | None = place
    while following and following.ranked and len(drafts) < most:
        place = following
        drafts.append(place.ranked[0].token_id)
        following = place.children.get(drafts[-1])
    return tuple(drafts), place


def _child(parent: Place, token_id: int, branch_id: str, ranked: Sequence[RankedToken]) -> Place:
    share = next((one.probability for one in parent.ranked if one.token_id == token_id), LEAST_CHANCE)
    place = Place(
        parent.length + 1,
        extended_hash(parent.hash, (token_id,)),
        branch_id,
        ranked,
        parent.chance * share,
    )
    parent.children[token_id] = place
    return place
