"""Attention of one pass over pages: new keys and values are written to their slots, all are read in place.

A sequence whose pages lie side by side is read as one view. One that shares a beginning lies in several segments: each
is attended by itself and the results are merged, so that nothing is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from paceline.engine.attention import attend_one, attend_part, causal_mask, merge_parts
from paceline.engine.kv_cache import Span


class Segment(NamedTuple):
    """Slots [start, stop) of the pool's memory, which hold neighbouring tokens of one sequence."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Reading:
    """What one span reads: its segments, and what each of its queries may see of the last of them."""

    span: Span
    segments: Sequence[Segment]
    mask: torch.Tensor | None


class PagedAttention:
    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, ...]],
        spans: Sequence[Span],
        segments: Sequence[Sequence[Segment]],
        slots: torch.Tensor,
    ) -> None:
        """`layers` holds keys and values [slots, KV heads, D] of each; `slots` [T] is where the new tokens go."""
        self._layers = layers
        self._slots = slots
        keys = layers[0][0]
        self._readings = [
            _Reading(
                span,
                parts,
                causal_mask(span.count, span.length, keys.dtype, keys.device) if _needs_mask(span, parts) else None,
            )
            for span, parts in zip(spans, segments, strict=True)
        ]
        self._attend_segments = _attend_in_parts if keys.device.type == "cpu" else _attend_gathered

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self._layers[layer]
        write(keys, self._slots, key)
        write(values, self._slots, value)
        outputs = []
        for reading in self._readings:
            rows = query.narrow(1, reading.span.start, reading.span.count)
            views = [(view(keys, segment), view(values, segment)) for segment in reading.segments]
            if len(views) == 1:
                attended = attend_one(rows, *views[0], reading.mask, scaling)
            else:
                attended = self._attend_segments(rows, views, reading, scaling)
            outputs.append(attended.reshape(rows.shape))
        return torch.cat(outputs, dim=1)


def _needs_mask(span: Span, segments: Sequence[Segment]) -> bool:
    whole_in_one = span.count == span.length and len(segments) == 1
    return span.count > 1 and not whole_in_one


def write(memory: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Store the new tokens' keys or values [KV heads, T, D] at `slots` [T]; nothing else is copied in a pass."""
    memory.index_copy_(0, slots, new.narrow(1, 0, slots.shape[0]).transpose(0, 1))


def view(memory: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Keys or values of a segment in place, [KV heads, tokens, D]."""
    return memory.narrow(0, segment.start, segment.stop - segment.start).transpose(0, 1)


def _attend_in_parts(
    query: torch.Tensor, views: Sequence[tuple[torch.Tensor, torch.Tensor]], reading: _Reading, scaling: float
) -> torch.Tensor:
    outputs, log_sums = [], []
    ends = list(accumulate(keys.shape[1] for keys, _ in views))
    for (keys, values), stop in zip(views, ends, strict=True):
        start, base = stop - keys.shape[1], reading.span.base_length
        mask = None
        if stop > base + 1:
            assert reading.mask is not None
            mask = reading.mask[:, start:stop]
        output, log_sum = attend_part(query, keys, values, mask, scaling)
        # Queries before the segment see nothing of it, which the kernel reports as a sum of 1.
        log_sum[..., : max(0, start - base)] = float("-inf")
        outputs.append(output)
        log_sums.append(log_sum)
    return merge_parts(outputs, log_sums)


def _attend_gathered(
    query: torch.Tensor, views: Sequence[tuple[torch.Tensor, torch.Tensor]], reading: _Reading, scaling: float
) -> torch.Tensor:
    keys, values = (torch.cat(parts, dim=1) for parts in zip(*views, strict=True))
    return attend_one(query, keys, values, reading.mask, scaling)
