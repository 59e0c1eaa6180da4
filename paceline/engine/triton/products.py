"""Products by the Triton kernel, and the sizes of their tiles."""

import torch

from paceline.engine.scratch import Memory, new_memory
from paceline.engine.triton.kernels import TritonKernels

WIDE_COLUMNS = 8192
"""Columns from which wide tiles alone keep every processor of a large GPU busy; fewer are cut narrower."""
NARROW_COLUMNS = 2048
STEP_BYTES = 256
"""Bytes of a row that a program reads at a time."""


class TiledWeight:
    """A weight [N, K] and a bias [N] or none."""

    way = "tiles"

    def __init__(self, kernels: TritonKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._kernels = kernels
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.float()
        self._columns = tile_columns(len(weight))
        self._step = STEP_BYTES // weight.itemsize

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Turn [M, K] of any dtype into [M, N] of float32."""
        rows = values.to(self._weight.dtype).contiguous()
        return self._kernels.product(rows, self._weight, self._bias, self._columns, self._step)


def tile_columns(column_count: int) -> int:
    """Return the columns of a tile, by the columns of the weight: more tiles than processors where that can be."""
    if column_count >= WIDE_COLUMNS:
        return 64
    return 32 if column_count > NARROW_COLUMNS else 16
