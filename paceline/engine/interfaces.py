"""The interface between the runner and a cache of any layout.

Every sequence has a cached length. A row of a call is served in this order: `keep` (roll back, take over what is
shared), `append` (make room), `attention` (write and read during the pass), `seal` (mark the tokens as computed, to be
shared), `truncate` (drop rejected drafts).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.errors import PrefixNotCached, SequenceNotFound
from paceline.types import CacheDescription


@dataclass(frozen=True)
class KvShape:
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group_size(self) -> int:
        """Number of query heads that share a KV head."""
        return self.head_count // self.kv_head_count

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layer_count * self.kv_head_count * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: [start, stop) in the packed row, and the last of the sequence's cached tokens."""

    sequence_id: str
    start: int
    stop: int
    length: int
    """Number of the sequence's cached tokens, the new ones included."""

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def base_length(self) -> int:
        return self.length - self.count


class Attention(Protocol):
    """Attention of one pass: stores new keys and values, then lets every query see its own sequence up to itself."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attend for the T tokens of the packed row: `query` [H, T, D], `key` and `value` [KV heads, T, D].

        Return [H, T, D].
        """
        ...


class KvCache(Protocol):
    @property
    def max_length(self) -> int:
        """Most tokens of one sequence, when it has the cache to itself."""
        ...

    @property
    def least_bytes(self) -> int:
        """Least capacity with which a cache of this shape can hold a token."""
        ...

    @property
    def sequence_count(self) -> int: ...

    def length(self, sequence_id: str) -> int:
        """Return the cached length of the sequence; 0 when it is unknown."""
        ...

    def token_ids(self, sequence_id: str) -> Sequence[int]:
        """Return the sequence's cached tokens; the caller must not change them."""
        ...

    def keep(self, sequence_id: str, base_length: int, next_token_ids: Sequence[int]) -> int:
        """Keep the first `base_length` tokens, then take over cached tokens that equal the next ones.

        Return the cached length, at most `base_length` + the next tokens. An unknown sequence is started when
        `base_length` is 0. Raise PrefixNotCached, and leave the sequence as it was, when less is cached.
        """
        ...

    def reused_count(self, sequence_id: str) -> int:
        """Return how many tokens the last `keep` of the sequence took over."""
        ...

    def next_key(self, sequence_id: str, next_token_ids: Sequence[int]) -> bytes | None:
        """Return the key of what another sequence could take over once these tokens are computed; None for nothing."""
        ...

    def append(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Make room for tokens after the kept ones, to be filled by a pass.

        Raise CacheFull when the budget is spent. Kept tokens stay then, and a sequence without tokens is forgotten.
        """
        ...

    def attention(self, spans: Sequence[Span]) -> Attention:
        """Set up a pass over appended tokens."""
        ...

    def seal(self, sequence_id: str, length: int) -> None:
        """Mark the first `length` tokens as computed: other sequences may take them over."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes held by sequences, counted in the way CacheFull counts the missing ones."""
        ...

    def truncate(self, sequence_id: str, length: int) -> None:
        """Keep the first `length` tokens. Raise SequenceNotFound or PrefixNotCached."""
        ...

    def release(self, sequence_id: str) -> bool:
        """Free the sequence; return False when it is unknown."""
        ...

    def describe(self) -> CacheDescription: ...


def let_go(cache: KvCache, sequence_id: str, base_length: int) -> None:
    """Cut the sequence of a failed row back to the prefix that the caller relied on.

    The caller would not know of tokens taken over beyond it, and so would never free them.
    """
    if base_length:
        cache.truncate(sequence_id, base_length)
    else:
        cache.release(sequence_id)


def check_base(sequence_id: str, base_length: int, cached_length: int) -> None:
    """Raise PrefixNotCached when a row relies on more than is cached."""
    if base_length > cached_length:
        raise PrefixNotCached(
            f"base_length {base_length} of sequence {sequence_id!r} is beyond the {cached_length} cached tokens; "
            "send the whole sequence with base_length 0",
            {"cached_length": str(cached_length)},
        )


def check_length(sequence_id: str, length: int, cached_length: int | None) -> None:
    """Raise unless the sequence is cached (its length is not None) and has at least `length` tokens."""
    if cached_length is None:
        raise SequenceNotFound(f"sequence {sequence_id!r} is not cached here", {"sequence_id": sequence_id})
    if length > cached_length:
        raise PrefixNotCached(
            f"length {length} of sequence {sequence_id!r} is beyond the {cached_length} cached tokens",
            {"cached_length": str(cached_length)},
        )
