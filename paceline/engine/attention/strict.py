"""Attention whose result for a query depends on its own sequence and position alone, to the last bit.

Kernels round differently for different numbers of query rows and different key widths, so a query's position fixes
both: position p is row p % BLOCK of a product of BLOCK rows, over keys padded with zeros to a width that p determines.
The other rows of the pass and the way tokens came into the cache change nothing. See docs/numerics.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attention.common import Shield, attend_one, causal_mask
from paceline.engine.attention.paged import views, write
from paceline.engine.interfaces import Span
from paceline.engine.plan import BatchPlan

BLOCK = 16
"""Query rows of every product."""
WIDTH = 64
"""Key widths are multiples of this."""


@dataclass(frozen=True)
class _Block:
    """Queries of one span whose positions lie in [start, start + BLOCK)."""

    start: int
    first: int
    """Position of the first query."""
    count: int
    column: int
    """Index of the first query in the packed row."""

    @property
    def width(self) -> int:
        return -(-(self.start + BLOCK) // WIDTH) * WIDTH


class StrictAttention:
    def __init__(self, memory: torch.Tensor, group_size: int, plan: BatchPlan) -> None:
        self._layers = memory.unbind(0)
        self._slots = torch.tensor(plan.slots, device=memory.device)
        self._shield = Shield(plan.spans, memory.device)
        self._readings = [
            (list(_blocks(span)), [views(memory, segment) for segment in parts])
            for span, parts in zip(plan.spans, plan.segments, strict=True)
        ]
        starts = {block.start for blocks, _ in self._readings for block in blocks}
        self._masks = {start: _mask(start, group_size, memory) for start in starts}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            write(self._layers[2 * layer], self._slots, key)
            write(self._layers[2 * layer + 1], self._slots, value)
            return self._read(layer, query, scaling)

        return self._shield.attend(attend, query, key, value)

    def _read(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        output = torch.zeros_like(query)
        for blocks, parts in self._readings:
            keys, values = (_padded([part[2 * layer + kind] for part in parts], blocks[-1].width) for kind in (0, 1))
            for block in blocks:
                rows = query.new_zeros((query.shape[0], BLOCK, query.shape[2]))
                offset = block.first - block.start
                new = slice(block.column, block.column + block.count)
                rows[:, offset : offset + block.count] = query[:, new]
                attended = attend_one(
                    rows, keys[:, : block.width], values[:, : block.width], self._masks[block.start], scaling
                )
                output[:, new] = attended.reshape(rows.shape)[:, offset : offset + block.count]
        return output


def _blocks(span: Span) -> Iterator[_Block]:
    position = span.base_length
    while position < span.length:
        start = position - position % BLOCK
        count = min(start + BLOCK, span.length) - position
        yield _Block(start, position, count, span.start + position - span.base_length)
        position += count


def _mask(start: int, group_size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the causal mask of the positions [start, start + BLOCK) over the width that `start` determines."""
    seen = causal_mask(BLOCK, start + BLOCK, group_size, like)
    width = _Block(start, start, 0, 0).width
    return torch.nn.functional.pad(seen, (0, width - start - BLOCK), value=float("-inf"))


def _padded(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return a sequence's keys or values as [KV heads, width, D], with zeros after its last token."""
    content = torch.cat(list(parts), dim=1)
    return torch.nn.functional.pad(content, (0, 0, 0, width - content.shape[1]))
