"""The rows of a block pass, as tensors on the device.

Positions, slots and tiles follow from them by arithmetic on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attention.tables import SPLIT_KEYS, TableRows, tile_queries

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
QUERY_COUNTS = (1, 2, 4, 6, 8, 16)
BLOCK_TOKENS = 512
"""Most tokens of a block, padding included."""
LEAST_KEYS = 4 * SPLIT_KEYS
"""Keys that the narrowest tables hold; each wider one holds four times as many."""


@dataclass(frozen=True)
class BlockShape:
    row_count: int
    query_count: int
    """Tokens of each row, padding included."""
    page_count: int
    """Pages of each row's table."""


def most_rows(query_count: int) -> int:
    """Return how many rows of so many tokens a block can hold."""
    return min(ROW_COUNTS[-1], BLOCK_TOKENS // _at_least(QUERY_COUNTS, query_count))


def fitting_shape(row_count: int, query_count: int, *, longest: int, page_tokens: int) -> BlockShape:
    """Return the smallest shape for these rows, of up to `longest` tokens with those cached and those that follow."""
    assert row_count <= most_rows(query_count)
    held = LEAST_KEYS
    while held < longest:
        held *= 4
    return BlockShape(_at_least(ROW_COUNTS, row_count), _at_least(QUERY_COUNTS, query_count), -(-held // page_tokens))


def _at_least(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


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
    """Page ids, [N, P]; any beyond a row's own."""

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

    def slots(self, page_tokens: int) -> torch.Tensor:
        """Return the slots [N * Q] of the tokens' keys and values; -1 for padding."""
        positions = self.positions
        pages = self.tables.gather(1, (positions // page_tokens).clamp_max(self.tables.shape[1] - 1))
        real = torch.arange(positions.shape[1], device=positions.device) < self.counts[:, None]
        return torch.where(real, pages * page_tokens + positions % page_tokens, -1).flatten()

    def by_tables(self, page_tokens: int, group_size: int, max_length: int) -> TableRows:
        """Return the rows as attention reads them, padding included, whose positions may be beyond the model's last."""
        row_count, query_count = self.token_ids.shape
        rows = torch.arange(row_count, device=self.bases.device)[:, None]
        starts = torch.arange(0, query_count, tile_queries(group_size), device=self.bases.device)[None]
        parts = (
            rows * query_count + starts,
            (self.counts[:, None] - starts).clamp(0, tile_queries(group_size)),
            self.bases[:, None] + starts,
            rows + 0 * starts,
        )
        return TableRows(
            self.positions.clamp_max(max_length - 1).flatten(),
            self.slots(page_tokens),
            torch.stack(parts, dim=-1).view(-1, len(parts)),
            self.tables.contiguous(),
            page_tokens,
        )


class BlockBuffer:
    """Memory for the rows of one shape. It never moves: recorded work reads it, and each pass fills it anew."""

    def __init__(self, shape: BlockShape, device: torch.device) -> None:
        self._shape = shape
        # Tables begin at a multiple of 16 bytes, whatever the shape: Triton compiles a kernel anew for other places.
        self._first_page = shape.query_count + 2 + shape.query_count % 2
        self._numbers = torch.zeros((shape.row_count, self._first_page + shape.page_count), dtype=torch.int64)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._numbers, self._copied = self._numbers.pin_memory(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._on_device = self._numbers.to(device)

    @property
    def rows(self) -> BlockRows:
        numbers, count = self._on_device, self._shape.query_count
        return BlockRows(numbers[:, :count], numbers[:, count], numbers[:, count + 1], numbers[:, self._first_page :])

    def fill(self, rows: Sequence[HostRow]) -> None:
        """Write the rows, then empty rows up to the shape, in one transfer."""
        if self._copied:
            self._copied.synchronize()  # the last transfer may still be reading
        numbers = self._numbers.numpy()
        for number, row in enumerate(rows):
            padding = [0] * (self._shape.query_count - len(row.token_ids))
            own = [*row.token_ids, *padding, len(row.token_ids), row.base_length]
            numbers[number, : len(own)] = own
            # What follows a row's own pages is not read.
            numbers[number, self._first_page : self._first_page + len(row.pages)] = row.pages
        numbers[len(rows) :, : self._first_page] = 0
        self._on_device.copy_(self._numbers, non_blocking=True)
        if self._copied:
            self._copied.record()
