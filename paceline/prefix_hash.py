"""The hash of a sequence's first tokens, by which coordinator and model service compare what they hold.

The hash is zlib's CRC-32 of the token ids as little-endian int32. It detects mistakes, not forgery.
"""

import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Protocol

_BLOCK_TOKENS = 1024
"""Tokens between remembered hashes, so that a cut sequence is not read from its start again."""


class Sliced(Protocol):
    def __getitem__(self, place: slice, /) -> Sequence[int]: ...


class PrefixHash:
    """Hashes of one sequence. Hashed tokens must not change except after `cut`."""

    def __init__(self) -> None:
        self._blocks = [0]
        """Hashes by the number of whole blocks they cover, as far as computed."""
        self._length = 0
        self._value = 0
        """Hash of the first `_length` tokens, the last answer."""

    def of(self, token_ids: Sliced, length: int) -> int:
        """Return the hash of the first `length` tokens. When it grows, only tokens after the last answer are read."""
        if 0 < self._length <= length and length // _BLOCK_TOKENS == self._length // _BLOCK_TOKENS:
            if length > self._length:
                self._value = extended_hash(self._value, token_ids[self._length : length])
                self._length = length
            return self._value
        block = min(length // _BLOCK_TOKENS, len(self._blocks) - 1)
        start, value = block * _BLOCK_TOKENS, self._blocks[block]
        if start < self._length <= length:
            start, value = self._length, self._value
        while start < length:
            stop = min(length, (start // _BLOCK_TOKENS + 1) * _BLOCK_TOKENS)
            value = extended_hash(value, token_ids[start:stop])
            if stop == len(self._blocks) * _BLOCK_TOKENS:
                self._blocks.append(value)
            start = stop
        self._length, self._value = length, value
        return value

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on, which may change now."""
        del self._blocks[length // _BLOCK_TOKENS + 1 :]
        if self._length > length:
            self._length, self._value = 0, 0


def extended_hash(value: int, token_ids: Sequence[int]) -> int:
    """Return the hash of a prefix whose own is `value`, with these tokens after it."""
    return zlib.crc32(_packed(token_ids), value)


def block_hashes(token_ids: Sliced, length: int, block_tokens: int) -> list[int]:
    """Return the hashes of the first `block_tokens` tokens, of twice as many and so on, none beyond `length`."""
    packed, value, hashes = memoryview(_packed(token_ids[:length])), 0, []
    for stop in range(block_tokens, length + 1, block_tokens):
        value = zlib.crc32(packed[stop - block_tokens : stop], value)
        hashes.append(value)
    return hashes


def _packed(token_ids: Sequence[int]) -> "array[int]":
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
