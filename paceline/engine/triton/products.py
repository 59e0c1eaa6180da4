"""Products of rows with a weight: by the Triton kernel, or by torch's library where that gives the same bits.

The kernel's result for a row depends on that row alone, and few rows take as long as memory does. The library is faster
for many rows, and promises nothing about its order of sums. So it is tried with each weight, at each number of rows at
which it is used.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from paceline.engine.scratch import Memory, new_memory
from paceline.engine.triton.kernels import TritonKernels
from paceline.engine.triton.product_kernels import ROWS
from paceline.engine.triton.tiles import product_tile

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies rows [M, K] by a weight [N, K]; returns [M, N] in float32."""
LIBRARY_ROWS = (128, 192, 256, 384, 512, 1024, 2048)
"""Numbers of rows at which the library is tried. Others are padded to the next; more are cut."""


def library_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(rows, weight.T, out_dtype=torch.float32)


class TiledWeight:
    """A weight [N, K] and a bias [N] or none."""

    way = "tiles"

    def __init__(
        self,
        kernels: TritonKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        library: Multiply | None = None,
    ) -> None:
        """`library` is asked for products of many rows; unset: torch's on CUDA, and none elsewhere."""
        self._kernels = kernels
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.float()
        self._tile = product_tile(len(weight), weight.dtype)
        self._library = library or (library_product if weight.device.type == "cuda" else None)
        self._agrees: dict[int, bool] = {}

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Turn [M, K] of any dtype into [M, N] of float32."""
        rows = values.to(self._weight.dtype).contiguous()
        if len(rows) <= ROWS or self._library is None:
            return self._tiled(rows)
        parts = [self._of_many(part, self._library) for part in torch.split(rows, LIBRARY_ROWS[-1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _tiled(self, rows: torch.Tensor) -> torch.Tensor:
        return self._kernels.product(rows, self._weight, self._bias, self._tile)

    def _of_many(self, rows: torch.Tensor, library: Multiply) -> torch.Tensor:
        count = len(rows)
        padded_count = next(size for size in LIBRARY_ROWS if size >= count)
        if padded_count not in self._agrees:
            self._agrees[padded_count] = self._found_equal(padded_count, library)
        if not self._agrees[padded_count]:
            return self._tiled(rows)
        if count < padded_count:  # padding by nothing would copy them
            rows = F.pad(rows, (0, 0, 0, padded_count - count))
        out = library(rows, self._weight)[:count]
        return out if self._bias is None else out.add_(self._bias)

    def _found_equal(self, row_count: int, library: Multiply) -> bool:
        """Return whether the library's product of so many rows is the kernel's, to the last bit."""
        generator = torch.Generator(self._weight.device).manual_seed(0)
        size = row_count, self._weight.shape[1]
        rows = torch.randn(size, generator=generator, device=generator.device).to(self._weight.dtype)
        try:
            found = library(rows, self._weight)
        except (RuntimeError, TypeError):  # such as a dtype that it does not know
            return False
        return all(torch.equal(own, other) for own, other in self._compared(rows, found))

    def _compared(self, rows: torch.Tensor, found: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # A few rows at a time, because the products of all may be large.
        for part, other in zip(torch.split(rows, ROWS), torch.split(found, ROWS), strict=True):
            yield self._kernels.product(part, self._weight, None, self._tile), other
