"""Attention of sequences that lie in several segments of the pool.

They share a beginning with others, or found no room side by side. Each segment is read once for all its sequences, and
the results are merged. Nothing is gathered on a CPU.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.attention.common import attend_one, attend_part, causal_mask, merge_parts
from paceline.engine.interfaces import Span


@dataclass(frozen=True)
class _Part:
    """One segment and the rows that read it."""

    views: Sequence[torch.Tensor]
    readers: list[tuple[int, int]] = field(default_factory=list)
    """For each row its index, and the place of this segment among the row's segments."""


@dataclass(frozen=True)
class _MaskedPart:
    """A segment that holds new tokens of its only reader, so that some queries do not see all of it."""

    part: _Part
    mask: torch.Tensor | None
    blind_count: int
    """Number of leading queries that come before the segment and see nothing of it."""


class SegmentedAttention:
    def __init__(self, memory: torch.Tensor, group_size: int) -> None:
        self._memory = memory
        self._group_size = group_size
        self._shared: dict[Hashable, _Part] = {}
        self._own: list[_MaskedPart] = []
        self._spans: dict[int, Span] = {}
        self._starts: dict[int, int] = {}
        self._part_count = 0
        self._token_count = 0
        self._gathered: dict[int, tuple[Sequence[Sequence[torch.Tensor]], torch.Tensor | None]] = {}

    def add(
        self, index: int, span: Span, segments: Sequence[Hashable], views: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Add row `index` of the pass, which reads `segments`; `views` are their keys and values in all layers."""
        self._spans[index] = span
        mask = None
        if span.count > 1:
            mask = causal_mask(span.count, span.length, self._group_size, self._memory)
        if self._memory.device.type != "cpu":
            self._gathered[index] = views, mask
            return
        self._starts[index] = self._token_count
        self._token_count += span.count
        self._part_count = max(self._part_count, len(segments))
        stop = 0
        for place, (segment, part_views) in enumerate(zip(segments, views, strict=True)):
            start, stop = stop, stop + part_views[0].shape[1]
            if stop <= span.base_length + 1:
                self._shared.setdefault(segment, _Part(part_views)).readers.append((index, place))
            else:
                own_mask = None if mask is None else mask[:, start:stop]
                part = _Part(part_views, [(index, place)])
                self._own.append(_MaskedPart(part, own_mask, max(0, start - span.base_length)))

    def attend(self, layer: int, rows: Sequence[torch.Tensor], scaling: float) -> dict[int, torch.Tensor]:
        """Return the outputs [H, q, D] of the added rows by index; `rows` are the queries of all rows of the pass."""
        if self._gathered:
            return {index: self._attend_gathered(layer, index, rows[index], scaling) for index in self._gathered}
        if not self._spans:
            return {}
        heads, _, size = rows[0].shape
        outputs = rows[0].new_zeros((self._part_count, heads, self._token_count, size))
        log_sums = rows[0].new_full((self._part_count, heads, self._token_count), float("-inf"), dtype=torch.float32)
        for part in self._shared.values():
            queries = [rows[index] for index, _ in part.readers]
            keys, values = part.views[2 * layer : 2 * layer + 2]
            found = attend_part(torch.cat(queries, dim=1), keys, values, None, scaling)
            self._place(part, outputs, log_sums, *found)
        for own in self._own:
            ((index, _),) = own.part.readers
            keys, values = own.part.views[2 * layer : 2 * layer + 2]
            found = attend_part(rows[index], keys, values, own.mask, scaling)
            # The kernel reports a sum of 1 for a query that sees nothing.
            found[1][:, : own.blind_count] = float("-inf")
            self._place(own.part, outputs, log_sums, *found)
        merged = merge_parts(outputs, log_sums)
        return {index: merged.narrow(1, self._starts[index], span.count) for index, span in self._spans.items()}

    def _place(
        self, part: _Part, outputs: torch.Tensor, log_sums: torch.Tensor, output: torch.Tensor, log_sum: torch.Tensor
    ) -> None:
        """Copy a part's results to its readers' places in `outputs` and `log_sums`."""
        taken = 0
        for index, place in part.readers:
            start, count = self._starts[index], self._spans[index].count
            outputs[place].narrow(1, start, count).copy_(output.narrow(1, taken, count))
            log_sums[place].narrow(1, start, count).copy_(log_sum.narrow(1, taken, count))
            taken += count

    def _attend_gathered(self, layer: int, index: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend over gathered keys, for devices whose kernels do not report their softmax sums."""
        views, mask = self._gathered[index]
        keys, values = (torch.cat([one[2 * layer + kind] for one in views], dim=1) for kind in (0, 1))
        return attend_one(query, keys, values, mask, scaling).view(query.shape)
