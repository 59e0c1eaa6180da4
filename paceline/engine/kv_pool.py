"""Keys and values by sequence, within a budget of bytes.

Owns the memory and the lengths; knows nothing of tokens, models or calls. First form: one slab a sequence, grown by
half, so that attention reads views and truncation is a change of length. The interface is made for pages.

Invariants: a sequence's length is at most its slab's capacity; the slabs' bytes sum to `used_bytes`, never above
`capacity_bytes`; truncation copies nothing.
"""

from dataclasses import dataclass

import torch

from paceline.errors import Overloaded, PrefixNotCached, SequenceNotFound

SLAB_STEP = 64
"""Slab capacities are multiples of this many tokens."""


@dataclass(frozen=True)
class KvShape:
    layer_count: int
    kv_head_count: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layer_count * self.kv_head_count * self.head_size * self.dtype.itemsize


class _Entry:
    """One sequence's memory and length."""

    def __init__(self, slab: torch.Tensor) -> None:
        self.length = 0
        self.place(slab)

    def place(self, slab: torch.Tensor) -> None:
        """Use `slab`, [layers, 2, 1, KV heads, capacity, head size]: of each layer the keys, then the values."""
        self.slab = slab
        self.layers = slab.unbind(0)
        self.capacity = slab.shape[4]


class KvPool:
    """Append, write, truncate, release."""

    def __init__(self, shape: KvShape, capacity_bytes: int) -> None:
        self.shape = shape
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._entries: dict[str, _Entry] = {}

    @property
    def sequence_count(self) -> int:
        return len(self._entries)

    def length(self, sequence_id: str) -> int:
        """Cached tokens of the sequence; 0 when it is unknown."""
        entry = self._entries.get(sequence_id)
        return entry.length if entry else 0

    def append(self, sequence_id: str, base_length: int, count: int) -> None:
        """Keep the first `base_length` tokens and make room for `count` more, to be filled by `write`.

        An unknown sequence is started when `base_length` is 0. Raises PrefixNotCached, or Overloaded when the budget
        is spent; the sequence is then as it was.
        """
        cached_length = self.length(sequence_id)
        if base_length > cached_length:
            raise PrefixNotCached(
                f"base_length {base_length} of sequence {sequence_id!r} is beyond the {cached_length} cached tokens; "
                "send the whole sequence with base_length 0",
                {"cached_length": str(cached_length)},
            )
        entry = self._with_capacity(sequence_id, base_length, base_length + count)
        entry.length = base_length + count

    def truncate(self, sequence_id: str, length: int) -> None:
        """Keep the first `length` tokens. O(1)."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            raise SequenceNotFound(f"sequence {sequence_id!r} is not cached here", {"sequence_id": sequence_id})
        if length > entry.length:
            raise PrefixNotCached(
                f"length {length} of sequence {sequence_id!r} is beyond the {entry.length} cached tokens",
                {"cached_length": str(entry.length)},
            )
        entry.length = length

    def release(self, sequence_id: str) -> bool:
        """Free the sequence; False when it is unknown."""
        entry = self._entries.pop(sequence_id, None)
        if entry is None:
            return False
        self.used_bytes -= entry.slab.nbytes
        return True

    def write(self, layer: int, sequence_id: str, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the last q tokens of one layer and return all its keys and values, as views.

        `new` is [2, 1, KV heads, q, head size], keys then values; the views are [1, KV heads, length, head size].
        """
        entry = self._entries[sequence_id]
        # `narrow`, for this runs once a row and layer, and indexing costs several times as much.
        count = new.shape[3]
        memory = entry.layers[layer]
        memory.narrow(3, entry.length - count, count).copy_(new)
        keys, values = memory.narrow(3, 0, entry.length).unbind(0)
        return keys, values

    def _with_capacity(self, sequence_id: str, kept_length: int, length: int) -> _Entry:
        entry = self._entries.get(sequence_id)
        if entry is not None and length <= entry.capacity:
            return entry
        grown = max(length, entry.capacity * 3 // 2 if entry else 0)
        slab = self._allocate(-(-grown // SLAB_STEP) * SLAB_STEP, freed_bytes=entry.slab.nbytes if entry else 0)
        if entry is None:
            entry = self._entries[sequence_id] = _Entry(slab)
        else:
            slab[..., :kept_length, :] = entry.slab[..., :kept_length, :]
            entry.place(slab)
        return entry

    def _allocate(self, capacity: int, freed_bytes: int) -> torch.Tensor:
        shape = self.shape
        needed_bytes = capacity * shape.token_bytes
        if self.used_bytes - freed_bytes + needed_bytes > self.capacity_bytes:
            raise Overloaded(
                f"the cache has no room: {needed_bytes} bytes are needed for {capacity} tokens, "
                f"{self.used_bytes} of {self.capacity_bytes} are in use; release sequences or raise --kv-memory-bytes",
            )
        self.used_bytes += needed_bytes - freed_bytes
        return torch.empty(
            (shape.layer_count, 2, 1, shape.kv_head_count, capacity, shape.head_size),
            dtype=shape.dtype,
            device=shape.device,
        )
