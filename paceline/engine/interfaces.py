"""What the runner asks of a cache, whatever its layout.

Every sequence has a length; its tokens before that are cached, in order. A row of a call is served in this order:
`keep` (roll back, take over what is shared), `append` (make room), `attention` (write and read during the pass), `seal`
(the tokens are computed and may be shared), `truncate` (drop rejected drafts).
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
        """Query heads that share a KV head."""
        return self.head_count // self.kv_head_count

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layer_count * self.kv_head_count * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """One sequence's new tokens in the packed row: [start, stop), the last of the sequence's cached tokens."""

    sequence_id: str
    start: int
    stop: int
    length: int
    """Cached tokens of the sequence, the new ones included."""

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def base_length(self) -> int:
        return self.length - self.count


class Attention(Protocol):
    """Attention of one pass: stores what is new, then lets every query see its own sequence up to itself."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """For the T tokens of the packed row `query` is [H, T, D], `key` and `value` [KV heads, T, D].

        Returns [H, T, D].
        """
        ...


class KvCache(Protocol):
    @property
    def max_length(self) -> int:
        """Tokens that one sequence may have when it has the cache to itself."""
        ...

    @property
    def least_bytes(self) -> int:
        """The least capacity with which a cache of this shape holds anything."""
        ...

    @property
    def sequence_count(self) -> int: ...

    def length(self, sequence_id: str) -> int:
        """Cached tokens of the sequence; 0 when it is unknown."""
        ...

    def token_ids(self, sequence_id: str) -> Sequence[int]:
        """The sequence's cached tokens; not to be changed."""
        ...

    def keep(self, sequence_id: str, base_length: int, next_token_ids: Sequence[int]) -> int:
        """Keep the first `base_length` tokens, then take over cached tokens that equal the next ones.

        Returns the cached length, at most `base_length` + the next tokens. An unknown sequence is started when
        `base_length` is 0. Raises PrefixNotCached; the sequence is then as it was.
        """
        ...

    def next_key(self, sequence_id: str, next_token_ids: Sequence[int]) -> bytes | None:
        """Name what another sequence could take over once these tokens are computed; None when nothing."""
        ...

    def append(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """Make room for tokens after the kept ones, to be filled by a pass.

        Raises CacheFull when the budget is spent; the kept tokens stay, and a sequence without any is forgotten.
        """
        ...

    def attention(self, spans: Sequence[Span]) -> Attention:
        """Set up a pass over appended tokens."""
        ...

    def seal(self, sequence_id: str, length: int) -> None:
        """The first `length` tokens are computed: others may take them over."""
        ...

    @property
    def held_bytes(self) -> int:
        """What sequences keep others from having, as CacheFull counts what is missing."""
        ...

    def truncate(self, sequence_id: str, length: int) -> None:
        """Keep the first `length` tokens. Raises SequenceNotFound or PrefixNotCached."""
        ...

    def release(self, sequence_id: str) -> bool:
        """Free the sequence; False when it is unknown."""
        ...

    def describe(self) -> CacheDescription: ...


def let_go(cache: KvCache, sequence_id: str, base_length: int) -> None:
    """Keep of a row that came to nothing what its caller relied on.

    What it took over besides would be known to nobody, and so never be taken back.
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
