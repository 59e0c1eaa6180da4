"""Sizes of tiles, by a model's sizes and dtype alone: so no result depends on how many rows there are."""

from dataclasses import dataclass

import torch
import triton

from paceline.engine.attention.tables import tile_queries

LEAST_ROWS = 16
"""Least rows of a tile, and least columns of a head: those of the hardware's smallest product."""
MOST_WARPS = 32
WIDE_COLUMNS = 6144
"""Columns from which wide tiles alone keep most processors of a large GPU busy; fewer are cut narrower."""
NARROW_COLUMNS = 2048
STEP_BYTES = 256
"""Bytes of a row that a program reads at a time."""


@dataclass(frozen=True)
class AttentionTile:
    queries: int
    """Neighbouring queries of a tile."""
    rows: int
    """Queries times the heads that share a KV head, and padding."""
    head_block: int
    """Size of a head, and padding."""
    step: int
    """Keys that a program reads at a time."""
    warps: int
    stages: int
    """Steps that are on their way from memory at once."""


FEW_TILE_ROWS = 32
"""Rows up to which a program has registers for long steps, which wait for memory less often."""


def attention_tile(group_size: int, head_size: int, dtype: torch.dtype) -> AttentionTile:
    """Return the largest tile whose program keeps what it works on in registers, as assembled for sm_80 and sm_90.

    Products in float32 are no work for tensor cores: every thread holds its rows of queries whole, so there are more
    threads, and each step is shorter.
    """
    queries, head_block = tile_queries(group_size), max(LEAST_ROWS, triton.next_power_of_2(head_size))
    rows = max(LEAST_ROWS, triton.next_power_of_2(group_size * queries))
    if dtype == torch.float32:
        return AttentionTile(queries, rows, head_block, 32, min(MOST_WARPS, rows // 2), 3)
    if rows <= FEW_TILE_ROWS and head_block <= 128:
        return AttentionTile(queries, rows, head_block, 128, 4, 2)
    return AttentionTile(queries, rows, head_block, 64, 8 if head_block > 128 else 4, 3)


@dataclass(frozen=True)
class ProductTile:
    columns: int
    step: int
    """Numbers of a row that a program reads at a time."""
    stages: int
    """Steps that are on their way from memory at once."""


def product_tile(column_count: int, dtype: torch.dtype) -> ProductTile:
    """Return the tile of a weight with so many columns: more tiles than processors where that can be.

    A program that reads few columns needs more steps on their way, so that memory is never idle.
    """
    step = STEP_BYTES // dtype.itemsize
    if column_count >= WIDE_COLUMNS:
        return ProductTile(64, step, 4)
    return ProductTile(32 if column_count > NARROW_COLUMNS else 16, step, 6)
