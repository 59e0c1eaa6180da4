"""Attention over a rectangle of left-padded rows. Queries are padded to a rectangle too, for one masked product."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from paceline.engine.attention.common import Shield
from paceline.engine.interfaces import KvShape, Span
from paceline.engine.plan import Places


@dataclass
class Rectangle:
    """Keys and values of a group, [layers, 2, KV heads, B, columns, D]. What lies left of a row's start is padding."""

    memory: torch.Tensor
    sequence_ids: list[str]
    """Sequence id of each row; empty when its sequence is gone."""
    starts: list[int]
    edge: int = 0
    """Column of the first new token of the pass under way."""

    @classmethod
    def empty(cls, shape: KvShape) -> "Rectangle":
        return cls.of(shape, [], [], 0)

    @classmethod
    def of(cls, shape: KvShape, sequence_ids: list[str], starts: list[int], columns: int) -> "Rectangle":
        # Zeros, because a weight of 0 times a NaN that was left in memory would be NaN.
        memory = torch.zeros(
            (shape.layer_count, 2, shape.kv_head_count, len(sequence_ids), columns, shape.head_size),
            dtype=shape.dtype,
            device=shape.device,
        )
        return cls(memory, sequence_ids, starts)

    def takes(self, sequence_ids: list[str], bases: list[int], new_count: int) -> bool:
        """Move the edge to where all rows end; return False if they end apart or have no room for the new tokens."""
        edges = {start + base for start, base in zip(self.starts, bases, strict=False)}
        if sequence_ids != self.sequence_ids or len(edges) != 1:
            return False
        (edge,) = edges
        if edge + new_count > self.memory.shape[4]:
            return False
        self.edge = edge
        return True

    def drop(self, sequence_id: str) -> None:
        self.sequence_ids[self.sequence_ids.index(sequence_id)] = ""

    def content(self, sequence_id: str, length: int) -> torch.Tensor:
        """Return the row without its padding, [layers, 2, KV heads, length, D], as a view."""
        row = self.sequence_ids.index(sequence_id)
        return self.memory[:, :, :, row, self.starts[row] : self.starts[row] + length]


class DenseAttention:
    def __init__(self, rectangle: Rectangle, spans: Sequence[Span]) -> None:
        self.spans = spans
        self._rectangle = rectangle

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all slots, [KV heads, slots, D] each."""
        keys, values = self._rectangle.memory[layer].flatten(2, 3)
        return keys, values

    @property
    def places(self) -> Places:
        """Each row is a page, named by its first slot."""
        column_count = self._rectangle.memory.shape[4]
        firsts = [[row * column_count + start] for row, start in enumerate(self._rectangle.starts)]
        return Places(firsts, column_count, 1)

    # Made on first use, because compiled kernels do without.
    @cached_property
    def _reading(self) -> "_Reading":
        return _Reading(self._rectangle, self.spans)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return self._reading.attend(layer, query, key, value, scaling)


class _Reading:
    """Attention by torch's operations, all rows in one."""

    def __init__(self, rectangle: Rectangle, spans: Sequence[Span]) -> None:
        device = rectangle.memory.device
        self._width = max(span.count for span in spans)
        stop = rectangle.edge + self._width
        # In rows with fewer new tokens these columns may hold rejected drafts, which are masked but may not be finite.
        rectangle.memory[..., rectangle.edge : stop, :].zero_()
        self._shield = Shield(spans, device)
        self._layers = rectangle.memory[..., :stop, :].unbind(0)
        places = [(row, offset) for row, span in enumerate(spans) for offset in range(span.count)]
        self._rows, self._offsets = torch.tensor(places, device=device).unbind(1)
        self._columns = self._offsets + rectangle.edge
        starts = torch.tensor(rectangle.starts, device=device)
        columns = torch.arange(stop, device=device)
        last = rectangle.edge + torch.arange(self._width, device=device)
        # [B, 1, q, columns]: a query sees from its row's first token up to itself.
        self._mask = ((columns >= starts[:, None, None]) & (columns <= last[:, None]))[:, None]
        self._batch = len(spans)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self._layers[layer].unbind(0)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys[:, self._rows, self._columns] = key
            values[:, self._rows, self._columns] = value
            return self._read(keys.transpose(0, 1), values.transpose(0, 1), query, scaling)

        return self._shield.attend(attend, query, key, value)

    def _read(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        padded = query.new_zeros((self._batch, query.shape[0], self._width, query.shape[2]))
        padded[self._rows, :, self._offsets] = query.transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=self._mask, scale=scaling, enable_gqa=True
        )
        return attended[self._rows, :, self._offsets].transpose(0, 1)
