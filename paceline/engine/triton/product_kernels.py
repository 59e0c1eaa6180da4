"""The Triton kernel of products of rows with weights: tiles of one size whatever the number of rows.

A number is one sum over K in one order, so a row's result depends on that row and the weights alone.
"""

import triton
import triton.language as tl

from paceline.engine.triton.order import await_earlier

ROWS = 64
"""Rows of a tile."""


@triton.jit(do_not_specialize=["row_count"])
def product_kernel(
    rows, weight, bias, out, row_count, column_count, size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of `rows` [M, K] by one of `weight` [N, K]; `out` [M, N] and `bias` [N] are float32.

    IS_EVEN says that K is a multiple of STEP. Tiles of the same weights follow each other, so memory is read once.
    """
    await_earlier(OVERLAPS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < row_count)[:, None], (column < column_count)[:, None]
    row_at, column_at = row.to(tl.int64)[:, None] * size, column.to(tl.int64)[:, None] * size
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, size, STEP):
        at = start + tl.arange(0, STEP)[None, :]
        if IS_EVEN:
            own = tl.load(rows + row_at + at, mask=is_row, other=0.0)
            weights = tl.load(weight + column_at + at, mask=is_column, other=0.0)
        else:
            own = tl.load(rows + row_at + at, mask=is_row & (at < size), other=0.0)
            weights = tl.load(weight + column_at + at, mask=is_column & (at < size), other=0.0)
        total = tl.dot(own, tl.trans(weights), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < column_count, other=0.0)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * column_count + column[None, :],
        total,
        mask=is_row & (column < column_count)[None, :],
    )
