"""The rows of a block pass, as tensors on the device.

Positions, slots and masks follow from them by arithmetic on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
QUERY_COUNTS = (1, 2, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class BlockShape:
    row_count: int
    query_count: int
    """Tokens of each row, padding included."""
    page_count: int
    """Pages of each row's table."""


def fitting_shape(
    row_count: int, query_count: int, *, longest_base: int, later_count: int = 0, page_tokens: int
) -> BlockShape | None:
    """Return the smallest shape for these rows; None when no shape is large enough.

    `query_count` tokens follow up to `longest_base` cached ones, and `later_count` more will follow those. Tables cover
    padding too: a kernel that aligns the last query with the last key counts padded queries as keys.
    """
    rows = next((one for one in ROW_COUNTS if one >= row_count), None)
    queries = next((one for one in QUERY_COUNTS if one >= query_count), None)
    if rows is None or queries is None:
        return None
    page_count = -(-(longest_base + max(queries, query_count + later_count)) // page_tokens)
    return BlockShape(rows, queries, max(8, 1 << (page_count - 1).bit_length()))


@dataclass(frozen=True)
class HostRow:
    """One row, as Python values."""

    token_ids: Sequence[int]
    base_length: int
    pages: Sequence[int]


@dataclass(frozen=True)
class BlockRows:
    """N rows of Q tokens. A row has `counts` real tokens, the first ones, after `bases` cached ones."""

    token_ids: torch.Tensor
    """[N, Q]"""
    counts: torch.Tensor
    """[N]"""
    bases: torch.Tensor
    """[N]"""
    tables: torch.Tensor
    """Page ids, [N, P]; the scratch page beyond a row's own."""

    @property
    def positions(self) -> torch.Tensor:
        """Absolute positions [N, Q]. Padding has positions too, after the real tokens."""
        return self.bases[:, None] + torch.arange(self.token_ids.shape[1], device=self.bases.device)

    @property
    def last(self) -> torch.Tensor:
        """Index [N] of each row's last real token among all N * Q tokens; of its first token when none is real."""
        row_count, query_count = self.token_ids.shape
        first = torch.arange(row_count, device=self.counts.device) * query_count
        return first + (self.counts - 1).clamp_min(0)

    def slots(self, page_tokens: int, scratch_page: int) -> torch.Tensor:
        """Return the slots [N * Q] of the tokens' keys and values; those of padding are in the scratch page."""
        positions = self.positions
        pages = self.tables.gather(1, (positions // page_tokens).clamp_max(self.tables.shape[1] - 1))
        real = torch.arange(positions.shape[1], device=positions.device) < self.counts[:, None]
        page = torch.where(real, pages, scratch_page)
        return (page * page_tokens + positions % page_tokens).flatten()

    def then(self, token_ids: torch.Tensor) -> "BlockRows":
        """Return the rows of the next step: one token each [N], after all tokens of these. Empty rows stay empty."""
        return replace(
            self, token_ids=token_ids[:, None], bases=self.bases + self.counts, counts=self.counts.clamp_max(1)
        )


class BlockBuffer:
    """Memory for the rows of one shape. It never moves: recorded work reads it, and each pass fills it anew."""

    def __init__(self, shape: BlockShape, scratch_page: int, device: torch.device) -> None:
        self._shape = shape
        self._scratch_page = scratch_page
        self._numbers = torch.empty((shape.row_count, shape.query_count + 2 + shape.page_count), dtype=torch.int64)
        if device.type == "cuda":
            self._numbers = self._numbers.pin_memory()
        self._on_device = self._numbers.to(device)
        self.fill([])

    @property
    def rows(self) -> BlockRows:
        numbers, count = self._on_device, self._shape.query_count
        return BlockRows(numbers[:, :count], numbers[:, count], numbers[:, count + 1], numbers[:, count + 2 :])

    def fill(self, rows: Sequence[HostRow]) -> None:
        """Write the rows, then empty rows up to the shape, in one transfer."""
        shape = self._shape
        numbers = []
        for row in rows:
            count = len(row.token_ids)
            padding = [0] * (shape.query_count - count)
            table = [*row.pages, *[self._scratch_page] * (shape.page_count - len(row.pages))]
            numbers.append([*row.token_ids, *padding, count, row.base_length, *table])
        empty = [0] * (shape.query_count + 2) + [self._scratch_page] * shape.page_count
        numbers += [empty] * (shape.row_count - len(rows))
        self._numbers.copy_(torch.tensor(numbers))
        self._on_device.copy_(self._numbers, non_blocking=True)
