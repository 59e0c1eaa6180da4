"""Attention of one pass over pages: new keys and values are written to their slots, and all are read in place.

A sequence whose pages lie side by side is read as one view. See `segmented` for a sequence in several segments.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from paceline.engine.attention.common import Shield, attend_one, causal_mask
from paceline.engine.attention.segmented import SegmentedAttention
from paceline.engine.attention.short import attend_short, is_short
from paceline.engine.interfaces import Attention, Span
from paceline.engine.plan import BatchPlan, Places, Segment

AttentionMaker = Callable[[torch.Tensor, int, BatchPlan], Attention]
"""Makes the attention of a pass from the pool's memory, the number of queries that share a KV head, and the plan."""


@dataclass(frozen=True)
class _Reading:
    """Keys and values that the queries of one span read, for a sequence in one segment."""

    span: Span
    views: Sequence[torch.Tensor]
    mask: torch.Tensor | None


class PagedAttention:
    def __init__(self, memory: torch.Tensor, group_size: int, plan: BatchPlan) -> None:
        self._plan = plan
        self._memory = memory
        self._group_size = group_size
        self._layers = memory.unbind(0)
        self._shield = Shield(plan.spans, memory.device)

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all slots, [KV heads, slots, D] each."""
        return self._layers[2 * layer], self._layers[2 * layer + 1]

    @property
    def spans(self) -> Sequence[Span]:
        return self._plan.spans

    @property
    def places(self) -> Places:
        return self._plan.places

    # Both are made on first use, because compiled kernels do without.
    @cached_property
    def _readings(self) -> "_Readings":
        rows = list(zip(self.spans, self._plan.segments, strict=True))
        return _Readings(self._memory, self._group_size, rows)

    @cached_property
    def _slots(self) -> torch.Tensor:
        return torch.tensor(self._plan.slots, device=self._memory.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.memory(layer)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            write(keys, self._slots, key)
            write(values, self._slots, value)
            return self._readings.attend(layer, query, scaling)

        return self._shield.attend(attend, query, key, value)


class _Readings:
    """Attention by torch's operations, row by row."""

    def __init__(self, memory: torch.Tensor, group_size: int, rows: Sequence[tuple[Span, Sequence[Segment]]]) -> None:
        self._counts = [span.count for span, _ in rows]
        self._whole: dict[int, _Reading] = {}
        self._short: defaultdict[int, dict[int, _Reading]] = defaultdict(dict)  # by count, then by row
        self._segmented = SegmentedAttention(memory, group_size)
        for index, (span, parts) in enumerate(rows):
            # Views are made once for all layers: made layer by layer they cost as much as the attention of a short row.
            part_views = [views(memory, segment) for segment in parts]
            if len(parts) > 1:
                self._segmented.add(index, span, parts, part_views)
                continue
            needs_mask = 1 < span.count < span.length
            mask = causal_mask(span.count, span.length, group_size, memory) if needs_mask else None
            alike = self._short[span.count] if is_short(span, memory) else self._whole
            alike[index] = _Reading(span, part_views[0], mask)

    def attend(self, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend for `query` [H, T, D]; return [H, T, D]."""
        rows = query.split_with_sizes(self._counts, dim=1)
        outputs = self._segmented.attend(layer, rows, scaling)
        for index, reading in self._whole.items():
            keys, values = reading.views[2 * layer : 2 * layer + 2]
            attended = attend_one(rows[index], keys, values, reading.mask, scaling)
            outputs[index] = attended.view(rows[index].shape)
        for alike in self._short.values():
            outputs.update(zip(alike, _attend_alike(layer, alike, rows, scaling), strict=True))
        return torch.cat([outputs[index] for index in range(len(rows))], dim=1)


def _attend_alike(
    layer: int, alike: Mapping[int, _Reading], rows: Sequence[torch.Tensor], scaling: float
) -> list[torch.Tensor]:
    readings = alike.values()
    return attend_short(
        [rows[index] for index in alike],
        [reading.views[2 * layer] for reading in readings],
        [reading.views[2 * layer + 1] for reading in readings],
        [reading.mask for reading in readings],
        scaling,
    )


def write(memory: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Store new keys or values [KV heads, >= T, D] at `slots` [T] of one layer's memory [KV heads, slots, D].

    A pass copies nothing else.
    """
    memory.index_copy_(1, slots, new.narrow(1, 0, slots.shape[0]))


def views(memory: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, ...]:
    """Return a segment's keys and values as views, [KV heads, tokens, D] each: those of layer n at 2n and 2n + 1."""
    return memory.narrow(2, segment.start, segment.stop - segment.start).unbind(0)
