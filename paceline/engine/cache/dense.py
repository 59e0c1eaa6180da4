"""The paper's layout: one rectangle of keys and values, rows padded on the left, realigned when rows grow unequally.

It exists so that EQSPEC and EXSPEC (arXiv 2510.22876, section 3) can be run and measured as published; `paged` is the
better cache. A pass first brings all its rows to one right edge (unpad, append, repad), and counts the bytes and the
time of that copying. Rows that grow equally stay where they are (the paper's corollary B.3).

Invariants: a sequence lies either in the rectangle or aside, never in both; dropping rejected drafts only changes a
length. The budget holds two rectangles, old and new, each with all sequences at the longest one's width.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attention.dense import DenseAttention, Rectangle
from paceline.engine.interfaces import KvShape, Span, check_base, check_length
from paceline.errors import CacheFull
from paceline.types import CacheDescription

SLACK = 64
"""Columns left free on the right, so that equal growth needs no new rectangle."""
RECTANGLES = 2
"""The old and the new rectangle exist together while rows are copied over."""


@dataclass
class _Row:
    token_ids: list[int]
    aside: torch.Tensor | None
    """[layers, 2, KV heads, length, D]; None when the sequence is in the rectangle."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


class DenseCache:
    def __init__(self, shape: KvShape, capacity_bytes: int) -> None:
        self.shape = shape
        self.capacity_bytes = capacity_bytes
        self._rows: dict[str, _Row] = {}
        self._rectangle = Rectangle.empty(shape)
        self._realigned_bytes = 0
        self._realignment_s = 0.0

    @property
    def max_length(self) -> int:
        return max(0, self.capacity_bytes // (RECTANGLES * self.shape.token_bytes) - SLACK)

    @property
    def least_bytes(self) -> int:
        return RECTANGLES * (SLACK + 1) * self.shape.token_bytes

    @property
    def sequence_count(self) -> int:
        return len(self._rows)

    def length(self, sequence_id: str) -> int:
        row = self._rows.get(sequence_id)
        return row.length if row else 0

    def token_ids(self, sequence_id: str) -> Sequence[int]:
        return self._rows[sequence_id].token_ids

    def keep(self, sequence_id: str, base_length: int, next_token_ids: Sequence[int]) -> int:
        check_base(sequence_id, base_length, self.length(sequence_id))
        if sequence_id not in self._rows:
            self._rows[sequence_id] = _Row([], self._empty(0))
        self.truncate(sequence_id, base_length)
        return base_length

    def reused_count(self, sequence_id: str) -> int:
        return 0

    def next_key(self, sequence_id: str, next_token_ids: Sequence[int]) -> bytes | None:
        return None

    def append(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        row = self._rows[sequence_id]
        lengths = [row.length + len(token_ids), *(one.length for one in self._rows.values() if one is not row)]
        needed_bytes = self._bytes_of(lengths)
        if needed_bytes > self.capacity_bytes:
            if not row.length:
                self.release(sequence_id)
            raise CacheFull(
                f"the dense cache has no room: {_held_count(lengths)} sequences padded to {max(lengths)} tokens need "
                f"{needed_bytes} of {self.capacity_bytes} bytes; release sequences or raise --kv-memory",
                {"missing_bytes": str(needed_bytes - self.capacity_bytes)},
            )
        row.token_ids += token_ids

    def attention(self, spans: Sequence[Span]) -> DenseAttention:
        began = time.perf_counter()
        bases = [span.base_length for span in spans]
        new_count = max(span.count for span in spans)
        if not self._rectangle.takes([span.sequence_id for span in spans], bases, new_count):
            self._realign(spans, max(bases), new_count)
        self._realignment_s += time.perf_counter() - began
        return DenseAttention(self._rectangle, spans)

    def seal(self, sequence_id: str, length: int) -> None:
        pass

    def truncate(self, sequence_id: str, length: int) -> None:
        row = self._rows.get(sequence_id)
        check_length(sequence_id, length, row.length if row else None)
        assert row is not None
        del row.token_ids[length:]
        if row.aside is None and not length:
            self._rectangle.drop(sequence_id)
            row.aside = self._empty(0)
        elif row.aside is not None and row.aside.shape[3] > length:
            row.aside = row.aside[:, :, :, :length].clone()  # a view would keep all of the memory

    def release(self, sequence_id: str) -> bool:
        row = self._rows.pop(sequence_id, None)
        if row is not None and row.aside is None:
            self._rectangle.drop(sequence_id)
        if not self._rows:
            self._rectangle = Rectangle.empty(self.shape)
        return row is not None

    def describe(self) -> CacheDescription:
        # The list is copied, because another thread may ask while a pass changes the rows.
        asides = sum(row.aside.nbytes for row in list(self._rows.values()) if row.aside is not None)
        return CacheDescription(
            layout="dense",
            capacity_bytes=self.capacity_bytes,
            used_bytes=asides + self._rectangle.memory.nbytes,
            sequence_count=self.sequence_count,
            token_bytes=self.shape.token_bytes,
            max_length=self.max_length,
            realigned_bytes=self._realigned_bytes,
            realignment_s=self._realignment_s,
        )

    @property
    def held_bytes(self) -> int:
        return self._bytes_of([row.length for row in self._rows.values()])

    def _bytes_of(self, lengths: Sequence[int]) -> int:
        """Return the bytes that the budget must hold. Sequences that were cut to nothing need no row."""
        return RECTANGLES * _held_count(lengths) * (max(lengths, default=0) + SLACK) * self.shape.token_bytes

    def _empty(self, length: int) -> torch.Tensor:
        shape = self.shape
        return torch.empty(
            (shape.layer_count, 2, shape.kv_head_count, length, shape.head_size), dtype=shape.dtype, device=shape.device
        )

    def _realign(self, spans: Sequence[Span], edge: int, new_count: int) -> None:
        """Build a rectangle of these rows whose cached tokens end at column `edge`; move other sequences aside."""
        old = self._rectangle
        group = [span.sequence_id for span in spans]
        new = Rectangle.of(self.shape, group, [edge - span.base_length for span in spans], edge + new_count + SLACK)
        new.edge = edge
        leaving = [one for one in old.sequence_ids if one and one not in group]
        # All copies come before any change: when memory runs out here, every row is still where it was.
        asides = [old.content(one, self._rows[one].length).clone() for one in leaving]
        for sequence_id, aside in zip(leaving, asides, strict=True):
            self._rows[sequence_id].aside = aside
            self._realigned_bytes += aside.nbytes
        for index, span in enumerate(spans):
            row = self._rows[span.sequence_id]
            if row.aside is None:
                content = old.content(span.sequence_id, span.base_length)
            else:
                content = row.aside[:, :, :, : span.base_length]
            new.memory[:, :, :, index, edge - span.base_length : edge] = content
            self._realigned_bytes += content.numel() * content.element_size()
            row.aside = None
        self._rectangle = new


def _held_count(lengths: Sequence[int]) -> int:
    return sum(length > 0 for length in lengths)
