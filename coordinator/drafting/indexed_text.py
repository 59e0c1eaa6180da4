"""A text in which the places are found where given tokens stood before: the ground of all sources without a model.

A *place* is the number of tokens before it, so the token at a place is what followed them. Places are chained by a hash
of the few tokens before them, the latest first, as compressors have done since LZ77; the latest of a chain are compared
with more tokens. Knows nothing of what is done with the places.
"""

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

TOKEN_BYTES = 4
TOKEN_BITS = 8 * TOKEN_BYTES
KEY_TOKENS = 2
"""Tokens before a place by which it is found: the shortest match."""
COMPARED = 8
"""Most tokens before a place that are compared: the longest match."""
STEPS = range(4)
"""Places of a chain that are looked at, which bounds the time of a search in any text."""

_KEY_BYTES = TOKEN_BYTES * KEY_TOKENS
_COMPARED_BYTES = TOKEN_BYTES * COMPARED


class IndexedText:
    """Token ids, with room for more, and their places. Each token of room takes 8 bytes beside the 4 of its id."""

    def __init__(self, room: "array[int]", count: int, first_place: int = 0) -> None:
        """Keep the text in `room`, of type int32, whose first `count` tokens are there already.

        Places before `first_place` are not found.
        """
        self.token_ids = room
        self.count = 0
        self.packed = memoryview(room).cast("B")
        self.latest = array("i", bytes(TOKEN_BYTES * (len(room) | 1)))
        """The latest place by the hash of the tokens before it, modulo the length of this; 0: none."""
        self.earlier = array("i", bytes(TOKEN_BYTES * len(room)))
        """For each place the one before it in its chain; 0: none."""
        self._first_place = max(first_place, KEY_TOKENS)
        self._count_up_to(count)

    @property
    def left_count(self) -> int:
        """Tokens for which there is room."""
        return len(self.token_ids) - self.count

    def extend(self, token_ids: Sequence[int]) -> int:
        """Add tokens as far as there is room, about 0.3 us for each; return how many."""
        start, stop = self.count, min(self.count + len(token_ids), len(self.token_ids))
        if start < stop:
            self.token_ids[start:stop] = array("i", token_ids[: stop - start])
            self._count_up_to(stop)
        return stop - start

    def _count_up_to(self, count: int) -> None:
        # What follows the last token is not known: that place is added with the token that follows.
        packed, latest, earlier, size = self.packed, self.latest, self.earlier, len(self.latest)
        for place in range(max(self.count, self._first_place), count):
            end = TOKEN_BYTES * place
            slot = crc32(packed[end - _KEY_BYTES : end]) % size
            earlier[place] = latest[slot]
            latest[slot] = place
        self.count = count

    def after(self, place: int, most: int) -> list[int]:
        """Return the tokens at a place, at most `most`."""
        return self.token_ids[place : min(place + most, self.count)].tolist()


Match = tuple[int, IndexedText, int]
"""Length of a match, and the text and place where it ends."""


def latest_matches(texts: Iterable[IndexedText], latest_token_ids: Sequence[int]) -> list[Match]:
    """Return the latest places where the latest tokens of a context stand before, in the order of the texts.

    Of `latest_token_ids` as many are compared as are given, `COMPARED` at most.
    """
    tail = array("i", latest_token_ids).tobytes()[-_COMPARED_BYTES:]
    number, key = int.from_bytes(tail, "big"), crc32(tail[-_KEY_BYTES:])
    found: list[Match] = []
    for text in texts:
        packed, earlier = text.packed, text.earlier
        place = text.latest[key % len(text.latest)]
        for _ in STEPS:
            if not place:
                break
            stop = TOKEN_BYTES * place
            start = stop - len(tail) if stop > len(tail) else 0
            # As digits of a number, the latest token is the lowest: so is the lowest digit that differs.
            differing = number ^ int.from_bytes(packed[start:stop], "big")
            equal_bits = (differing & -differing).bit_length() - 1 if differing else 8 * len(tail)
            length = equal_bits // TOKEN_BITS
            if length > place:  # before a text's first token there is none, and not token 0
                length = place
            if length >= KEY_TOKENS:  # else only the hash is the same
                found.append((length, text, place))
            place = earlier[place]
    return found
