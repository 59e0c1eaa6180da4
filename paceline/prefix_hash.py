"""The hash of a sequence's first tokens: coordinator and model service compare what they hold by it.

Owns how it is computed. It tells of mistakes, not of forgers: CRC-32, as zlib's, of token ids as little-endian int32.
"""

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Protocol

_BLOCK_TOKENS = 1024
"""The hash at every so many tokens is remembered, so that a sequence that was cut is not read from its start."""


class Sliced(Protocol):
    def __getitem__(self, place: slice, /) -> Sequence[int]: ...


class PrefixHash:
    """Of one sequence. What was hashed once must not change, unless `cut` is told."""

    def __init__(self) -> None:
        self._blocks = [0]
        """After each whole block, as far as was asked for."""
        self._length = 0
        self._value = 0
        """Of the first `_length` tokens: the last answer."""

    def of(self, token_ids: Sliced, length: int) -> int:
        """Return the hash of the first `length` tokens. Reads those after the last answer, where they are more."""
        block = min(length // _BLOCK_TOKENS, len(self._blocks) - 1)
        start, value = block * _BLOCK_TOKENS, self._blocks[block]
        if start < self._length <= length:
            start, value = self._length, self._value
        while start < length:
            stop = min(length, (start // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS)
            value = zlib.crc32(_packed(token_ids[start:stop]), value)
            if stop == len(self._blocks) * _BLOCK_TOKENS:
                self._blocks.append(value)
            start = stop
        self._length, self._value = length, value
        return value

    def cut(self, length: int) -> None:
        """Tokens from `length` on may be others now."""
        del self._blocks[length // _BLOCK_TOKENS + 1 :]
        if self._length > length:
            self._length, self._value = 0, 0


def _packed(token_ids: Sequence[int]) -> "array[int]":
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
