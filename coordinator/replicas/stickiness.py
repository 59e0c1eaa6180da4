"""Which replica a prompt goes to, so that the replica's cache already has as much of it as possible.

Owns the choice, and what it remembers for it: which beginnings of prompts were sent to which replica. All of that is a
hint: a wrong one costs prompt tokens computed again, and no output. Knows nothing of queues, rounds and circuits.

1. No replica gets more than its share of the load by a factor: consistent hashing with bounded loads (Mirrokni et al.,
   arXiv 1608.01350).
2. A prompt goes to the replica that was sent the longest beginning of it.
3. Otherwise its beginning is hashed together with each address, and the highest hash wins (rendezvous hashing, Thaler
   and Ravishankar, 1998). So coordinators agree without talking, and a replica that leaves moves only its own prompts.

A system prompt, say, is common: many prompts begin with it, and each goes on differently. It is worth being at every
replica. So it decides nothing, and the beginning that is hashed ends with the first block after it.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil
from typing import Protocol, TypeVar

from paceline.prefix_hash import Sliced, block_hashes
from paceline.types import CacheDescription, ModelDescription, ModelIdentity

LOAD_BOUND = 1.25
"""Most load of a replica as a multiple of the mean."""
BLOCK_TOKENS = 16
"""Beginnings are compared at multiples of this length."""
MOST_BLOCKS = 1024
"""Blocks of a prompt that are looked at; prompts that begin alike for longer count as alike."""
MOST_BEGINNINGS = 1 << 16
"""Most beginnings remembered of a replica: about 6 MB."""
COMMON_WAYS = 2
"""A beginning is common when so many prompts for each replica went on after it as none did before. To compute it at
every replica then costs half at most of what it spared."""

Beginnings = Sequence[int]
"""Hashes of a prompt's beginnings, the shortest first."""


class SentBeginnings:
    """The beginnings that one replica was sent, as many as its cache has room for, the latest."""

    def __init__(self, cache: CacheDescription) -> None:
        capacity = cache.capacity_bytes // (BLOCK_TOKENS * cache.token_bytes) if cache.token_bytes else 0
        self._most = min(capacity or MOST_BEGINNINGS, MOST_BEGINNINGS)
        self._sent: OrderedDict[int, None] = OrderedDict()

    def count(self, beginnings: Beginnings) -> int:
        """Return how many of the beginnings were sent."""
        # Shorter ones are later in the order, so none is forgotten before a longer one.
        return bisect_left(beginnings, True, key=lambda one: one not in self._sent)

    def add(self, beginnings: Beginnings) -> None:
        for one in reversed(beginnings):
            self._sent[one] = None
            self._sent.move_to_end(one)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)


class SentTo:
    """What a replica was sent: nothing any more, once another process answers in its place."""

    def __init__(self) -> None:
        self._identity: ModelIdentity | None = None
        self._beginnings: SentBeginnings | None = None

    def beginnings(self, model: ModelDescription | None) -> SentBeginnings | None:
        """Return the beginnings that the process with this description was sent; None when it shares none."""
        if model and model.identity != self._identity:
            self._identity = model.identity
            self._beginnings = SentBeginnings(model.cache) if model.cache.prefix_sharing else None
        return self._beginnings


class Holder(Protocol):
    """A replica to choose."""

    @property
    def address(self) -> str: ...
    @property
    def load(self) -> tuple[int, float]:
        """Count of its sequences, then the used share of its cache."""
        ...

    @property
    def sent(self) -> SentBeginnings | None:
        """The beginnings it was sent; None when it computes equal beginnings more than once."""
        ...


HolderT = TypeVar("HolderT", bound=Holder)


def beginnings_of(token_ids: Sliced, token_count: int) -> Beginnings:
    """Return the beginnings of a prompt of `token_count` tokens; none of a short one."""
    # The last token is computed anyway.
    return block_hashes(token_ids, min(token_count - 1, MOST_BLOCKS * BLOCK_TOKENS), BLOCK_TOKENS)


class Stickiness:
    def __init__(self) -> None:
        self._ways: OrderedDict[int, int] = OrderedDict()
        """Prompts of which no longer beginning was known, by that beginning; the latest changed last."""

    def home(
        self, able: Sequence[HolderT], serving: Sequence[HolderT], beginnings: Beginnings, sequence_count: int = 1
    ) -> HolderT | None:
        """Return the best of `able` for sequences that begin alike; None when their beginning says nothing.

        The load is shared by all of `serving`.
        """
        common_count = self._common_count(beginnings, len(serving))
        within = self._within_bound(able, serving, sequence_count)
        sharing = {one: one.sent for one in within if one.sent is not None}
        if not sharing or common_count == len(beginnings):
            return None
        counts = {one: max(sent.count(beginnings), common_count) for one, sent in sharing.items()}
        most, key = max(counts.values()), beginnings[common_count]
        holders = (one for one, count in counts.items() if count == most)
        return max(holders, key=lambda one: _rank(key, one.address))

    def _within_bound(
        self, able: Sequence[HolderT], serving: Sequence[HolderT], sequence_count: int
    ) -> Sequence[HolderT]:
        """Return the replicas that have room for the sequences below the bound on their load."""
        total = sum(one.load[0] for one in serving) + sequence_count
        bound = ceil(LOAD_BOUND * total / max(1, len(serving)))
        return [one for one in able if one.load[0] + sequence_count <= bound]

    def _common_count(self, beginnings: Beginnings, replica_count: int) -> int:
        """Return how many of the beginnings are common."""
        least = COMMON_WAYS * replica_count
        counts = range(len(beginnings), 0, -1)
        return next((count for count in counts if self._ways.get(beginnings[count - 1], 0) >= least), 0)

    def note(self, chosen: HolderT, replicas: Sequence[HolderT], beginnings: Beginnings) -> None:
        """Remember where the beginnings are sent, and which was the longest that was known before."""
        known = max((one.sent.count(beginnings) for one in replicas if one.sent is not None), default=0)
        if known:
            longest = beginnings[known - 1]
            self._ways[longest] = self._ways.pop(longest, 0) + 1
            if len(self._ways) > MOST_BEGINNINGS:
                self._ways.popitem(last=False)
        if chosen.sent is not None:
            chosen.sent.add(beginnings)


def _rank(key: int, address: str) -> bytes:
    return blake2b(address.encode(), digest_size=8, key=key.to_bytes(4, "little")).digest()
