"""A text in which the places are found where given tokens stood before: the ground of all sources without a model.

A *place* is the number of tokens before it, so the token at a place is what followed them. Places with the same tokens
before them are chained, the latest first, as compressors have done since LZ77. There are two chains, by four tokens and
by one: in the second alone, the latest of the many places of a frequent token would hide a longer match. Knows nothing
of what is done with the places.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

TOKEN_BYTES = 4
KEY_LENGTHS = (4, 1)
"""Tokens before a place by which it is chained; the second is the shortest match."""
COMPARED = 8
"""Most tokens before a place that are compared: the longest match of a search."""
STEPS = range(4)
"""Places of a chain that are looked at, which bounds the time of a search in any text."""


class IndexedText:
    """Token ids, with room for more, and their places. Each token of room takes 17 bytes beside the 4 of its id.

    Places are chained when one is looked for: while a long match goes on, none is.
    """

    def __init__(self, room: "array[int]", count: int, first_place: int = 0) -> None:
        """Keep the text in `room`, of type int32, whose first `count` tokens are there already.

        Places before `first_place` are not found.
        """
        self.token_ids = room
        self.count = count
        self._packed = memoryview(room).cast("B")
        self._chains = [_Chains.of(len(room)) for _ in KEY_LENGTHS]
        self._chained_count = max(first_place, 1)
        """The places before this one are chained, or are not to be found."""

    @property
    def left_count(self) -> int:
        """Tokens for which there is room."""
        return len(self.token_ids) - self.count

    def extend(self, token_ids: Sequence[int]) -> int:
        """Add tokens as far as there is room; return how many."""
        start, stop = self.count, min(self.count + len(token_ids), len(self.token_ids))
        if start < stop:  # else a full array would be made longer
            self.token_ids[start:stop] = array("i", token_ids[: stop - start])
            self.count = stop
        return stop - start

    def chains(self) -> "list[_Chains]":
        """Return the chains of all places by `KEY_LENGTHS`. A place that is new takes about 1 us."""
        if self._chained_count < self.count:
            self._chain()
        return self._chains

    def _chain(self) -> None:
        token_ids, packed, key_length = self.token_ids, self._packed, KEY_LENGTHS[0]
        (latest, earlier), (latest_by_one, earlier_by_one) = self._chains
        size = len(latest)
        # What follows the last token is not known: that place is added with the token that follows.
        for place in range(self._chained_count, self.count):
            slot = token_ids[place - 1] % size
            earlier_by_one[place] = latest_by_one[slot]
            latest_by_one[slot] = place
            if place >= key_length:
                end = TOKEN_BYTES * place
                slot = crc32(packed[end - TOKEN_BYTES * key_length : end]) % size
                earlier[place] = latest[slot]
                latest[slot] = place
        self._chained_count = self.count

    def after(self, place: int, most: int) -> list[int]:
        """Return the tokens at a place, at most `most`."""
        stop = place + most
        return self.token_ids[place : stop if stop < self.count else self.count].tolist()


class _Chains(NamedTuple):
    """Places with the same tokens before them, or whose tokens happen to share a slot."""

    latest: "array[int]"
    """The latest place, by the slot of the tokens before it: a hash of them modulo the length of this; 0: none."""
    earlier: "array[int]"
    """For each place the one before it in its chain; 0: none."""

    @staticmethod
    def of(room: int) -> "_Chains":
        return _Chains(array("i", bytes(TOKEN_BYTES * (room | 1))), array("i", bytes(TOKEN_BYTES * room)))


def index_of(text: "array[int]") -> IndexedText:
    """Index a whole text, packed as `CommittedTokens` keeps a prompt: about 0.7 us and 17 bytes a token.

    It may run in any thread. The index shares the text with its owner, and outputs share the index; neither changes.
    """
    index = IndexedText(text, len(text))
    index.chains()
    return index


Match = tuple[int, IndexedText, int]
"""Length of a match, and the text and place where it ends."""


def latest_matches(texts: Iterable[IndexedText], latest_token_ids: Sequence[int]) -> list[Match]:
    """Return the latest places that the latest tokens of a context stand before, in the order of the texts.

    They are those of the longest of `KEY_LENGTHS` that is found. Of `latest_token_ids` the last `COMPARED` count.
    """
    backwards = latest_token_ids[: -COMPARED - 1 : -1]
    found: list[Match] = []
    for chain_number, shortest in enumerate(KEY_LENGTHS):
        if found or shortest > len(backwards):
            continue
        key = crc32(array("i", latest_token_ids[-shortest:]).tobytes()) if shortest > 1 else backwards[0]
        for text in texts:
            token_ids = text.token_ids
            latest, earlier = text.chains()[chain_number]
            place = latest[key % len(latest)]
            for _ in STEPS:
                if not place:
                    break
                at = place
                for token_id in backwards:
                    if not at or token_ids[at - 1] != token_id:
                        break
                    at -= 1
                if place - at >= shortest:  # else only the slot is the same
                    found.append((place - at, text, place))
                place = earlier[place]
            if len(found) >= len(STEPS):
                break
    return found
