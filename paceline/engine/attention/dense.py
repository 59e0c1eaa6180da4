"""Attention over a rectangle of left-padded rows. Queries are padded to a rectangle too, for one masked product."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.engine.attention.common import Shield
from paceline.engine.interfaces import KvShape, Span


@dataclass
class Rectangle:
    """Keys and values of a group, [layers, 2, B, KV heads, columns, D]. What lies left of a row's start is padding."""

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
            (shape.layer_count, 2, len(sequence_ids), shape.kv_head_count, columns, shape.head_size),
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
        return self.memory[:, :, row, :, self.starts[row] : self.starts[row] + length]


class DenseAttention:
    def __init__(self, rectangle: Rectangle, spans: Sequence[Span]) -> None:
        device = rectangle.memory.device
        self._width = max(span.count for span in spans)
        self._stop = rectangle.edge + self._width
        # In rows with fewer new tokens these columns may hold rejected drafts, which are masked but may not be finite.
        rectangle.memory[..., rectangle.edge : self._stop, :].zero_()
        self._shield = Shield(spans, device)
        self._layers = rectangle.memory[..., : self._stop, :].unbind(0)
        places = [(row, offset) for row, span in enumerate(spans) for offset in range(span.count)]
        self._rows, self._offsets = torch.tensor(places, device=device).unbind(1)
        self._columns = self._offsets + rectangle.edge
        starts = torch.tensor(rectangle.starts, device=device)
        columns = torch.arange(self._stop, device=device)
        last = rectangle.edge + torch.arange(self._width, device=device)
        # [B, 1, q, columns]: a query sees from its row's first token up to itself.
        self._mask = ((columns >= starts[:, None, None]) & (columns <= last[:, None]))[:, None]
        self._batch = len(spans)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self._layers[layer].unbind(0)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys[self._rows, :, self._columns] = key.transpose(0, 1)
            values[self._rows, :, self._columns] = value.transpose(0, 1)
            return self._read(keys, values, query, scaling)

        return self._shield.attend(attend, query, key, value)

    def _read(self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        padded = query.new_zeros((self._batch, query.shape[0], self._width, query.shape[2]))
        padded[self._rows, :, self._offsets] = query.transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=self._mask, scale=scaling, enable_gqa=True
        )
        return attended[self._rows, :, self._offsets].transpose(0, 1)
