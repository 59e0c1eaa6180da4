"""Products whose results depend on no other row: float32 or bfloat16 rows with weights of the same. See `products.h`.

It owns how weights are arranged, and in which of the library's ways this machine multiplies.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F

from paceline.engine.native.kernels import Kernels, find_kernels

WAYS = {torch.float32: ("float32",), torch.bfloat16: ("tiled", "dotted", "widened")}
"""Ways to multiply; in bfloat16 by AMX, AVX512-BF16, and what every processor has. The first are mostly faster."""
CLEARLY_FASTER = 1.5
"""How much faster a later way must be: replicas on one kind of machine have to choose alike."""
COLUMNS = 16
HALF_STEP = 32
"""Sizes of rows in bfloat16 are multiples of this."""
_TRIED_SIZE = 1024
_TRIED_ROWS = 16
_TRIALS = 5


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> "PackedWeight | None":
    """Arrange a weight [N, K] and a bias [N] or none for the kernels; return None if they cannot multiply by it."""
    return PackedWeight(weight, bias) if can_pack(weight) else None


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether a weight [N, K] can become a `PackedWeight`."""
    fits = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % HALF_STEP == 0)
    return fits and weight.device.type == "cpu" and find_kernels() is not None


class PackedWeight:
    """A weight [N, K] arranged for the kernels, and a bias [N] or none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, way: str | None = None) -> None:
        """`way` is one that the machine has; None for the best one."""
        kernels = find_kernels()
        assert kernels and can_pack(weight) and way in (None, *WAYS[weight.dtype])
        self._kernels, self.way = kernels, way or best_way(kernels, weight.dtype)
        self._way = _found(kernels, self.way)
        self._column_count, self._dtype = len(weight), weight.dtype
        self._weights, self._bias = arranged(weight), None
        if bias is not None:
            self._bias = F.pad(bias.float(), (0, -self._column_count % COLUMNS))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Turn [M, K] of any dtype into [M, N] of float32."""
        rows = values.to(self._dtype).contiguous()
        product = self._kernels.product(self._way, rows, self._weights, self._bias)
        # The compiled operations that read the result know no gaps between its rows.
        return product[:, : self._column_count].contiguous()


def _found(kernels: Kernels, name: str) -> int:
    way = kernels.product_way(name)
    assert way is not None
    return way


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """Rearrange [N, K], padded with zeros to a multiple of 16 columns.

    As [N / 16, K, 16, 1] in float32, and as [N / 16, K / 2, 16, 2] in bfloat16.
    """
    column_count, size = weight.shape
    numbers = 4 // weight.itemsize
    padded = F.pad(weight, (0, 0, 0, -column_count % COLUMNS))
    return padded.view(-1, COLUMNS, size // numbers, numbers).transpose(1, 2).contiguous()


@cache
def best_way(kernels: Kernels, dtype: torch.dtype) -> str:
    """Return the first way that this machine has, unless a later one is clearly faster here."""
    ways = [way for way in WAYS[dtype] if kernels.product_way(way) is not None]
    if len(ways) == 1:
        return ways[0]
    found = {way: _seconds(kernels, way, dtype) for way in ways}
    chosen = ways[0]
    for way, seconds in found.items():
        if seconds * CLEARLY_FASTER < found[chosen]:
            chosen = way
    return chosen


def _seconds(kernels: Kernels, way: str, dtype: torch.dtype) -> float:
    """Return the time of a product, the least of some."""
    weights = arranged(torch.ones((_TRIED_SIZE, _TRIED_SIZE), dtype=dtype))
    rows = torch.ones((_TRIED_ROWS, _TRIED_SIZE), dtype=dtype)
    function, times = _found(kernels, way), []
    for _ in range(_TRIALS):
        began = time.perf_counter()
        kernels.product(function, rows, weights, None)
        times.append(time.perf_counter() - began)
    return min(times)
