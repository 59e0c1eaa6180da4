"""Products whose results depend on no other row: float32 or bfloat16 rows with weights of the same or of int8.

Beside weights of int8 rows may be rounded to it, too; these weights are told by uint8, in which the library reads them.

It owns how weights are arranged, and in which of the library's ways this machine multiplies. See `products.h`.
"""

import math
import time
from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from paceline.engine.native.kernels import Kernels, find_kernels
from paceline.engine.quantization import QuantizedWeight
from paceline.engine.scratch import Memory, new_memory

WAYS = {
    torch.float32: ("float32",),
    torch.bfloat16: ("tiled", "dotted", "widened"),
    torch.int8: ("int8",),
    torch.uint8: ("counted", "paired"),
}
"""Ways to multiply by the weights' dtype; in bfloat16 by AMX, AVX512-BF16, and what every processor has, in uint8 by
AVX512-VNNI and AVX2, which give the same bits. The first are mostly faster."""
SAME_BITS = {"counted": "int8 rows", "paired": "int8 rows"}
"""What ways are called that give the same bits: replicas that differ in nothing else are one model."""
CLEARLY_FASTER = 1.75
"""How much faster a later way must be: replicas on one kind of machine have to choose alike. Of kinds that were
measured, none is near: widened rows take 0.7 of dotted ones' time on an Intel Xeon with AVX512-BF16."""
COLUMNS = 16
ROW_DTYPES = (torch.float32, torch.bfloat16)
SIZE_STEPS = {torch.float32: 1, torch.bfloat16: 32, torch.int8: 4, torch.uint8: 16}
"""Rows' sizes are multiples of this, by the weights' dtype."""
MOST_ROUNDED = 1 << 16
"""Most numbers of a rounded row: sums of more might not fit 32 bits."""
_TRIED_SIZE = 1024
_TRIED_ROWS = 16
_TRIALS = 40
"""Of each way: some 10 ms, so that a pause of the machine does not outlast them."""

Weight = torch.Tensor | QuantizedWeight


def packed(weight: Weight, bias: torch.Tensor | None) -> "PackedWeight | None":
    """Arrange a weight [N, K] and a bias [N] or none for the kernels; return None if they cannot multiply by it."""
    return PackedWeight(weight, bias) if can_pack(weight) else None


def can_pack(weight: Weight) -> bool:
    """Return whether a weight [N, K] can become a `PackedWeight`."""
    dtype, numbers, kernels = _kind(weight), _numbers(weight), find_kernels()
    if kernels is None or dtype not in WAYS or weight.dtype not in ROW_DTYPES or numbers.device.type != "cpu":
        return False
    size = numbers.shape[1]
    fits = size % SIZE_STEPS[dtype] == 0 and (dtype != torch.uint8 or size <= MOST_ROUNDED)
    return fits and bool(_ways(kernels, dtype))


class PackedWeight:
    """A weight [N, K] arranged for the kernels, and a bias [N] or none."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, way: str | None = None) -> None:
        """`way` is one that the machine has; None for the best one."""
        kernels, numbers, dtype = find_kernels(), _numbers(weight), _kind(weight)
        assert kernels and can_pack(weight) and way in (None, *WAYS[dtype])
        chosen = way or best_way(kernels, dtype)
        self._kernels, self._way = kernels, _found(kernels, chosen)
        self.way = SAME_BITS.get(chosen, chosen)
        self.column_count, self.dtype = len(numbers), weight.dtype
        """The dtype is the one that rows are rounded to."""
        self._weights = arranged(numbers.view(torch.uint8) ^ 128 if dtype == torch.uint8 else numbers)
        self.padded_count = self._weights.shape[0] * COLUMNS
        self._bias = None if bias is None else self._padded(bias)
        self._scales = self._padded(weight.scales) if isinstance(weight, QuantizedWeight) else None

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Turn [M, K] of any dtype into [M, N] of float32."""
        # The compiled operations that read the result know no gaps between its rows.
        return self.padded(values, memory)[:, : self.column_count].contiguous()

    def padded(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Return the product with `padded_count` columns, of which the last mean nothing."""
        # Beside weights of int8 rows are rounded as beside others.
        rows = values.to(self.dtype).contiguous()
        return self._kernels.product(self._way, rows, self._weights, self._bias, self._scales, memory)

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        return F.pad(values.float(), (0, -self.column_count % COLUMNS)).contiguous()


def _numbers(weight: Weight) -> torch.Tensor:
    return weight.numbers if isinstance(weight, QuantizedWeight) else weight


def _kind(weight: Weight) -> torch.dtype:
    return torch.uint8 if isinstance(weight, QuantizedWeight) and weight.rounds_rows else _numbers(weight).dtype


def _ways(kernels: Kernels, dtype: torch.dtype) -> list[str]:
    """Return the ways that this machine has."""
    return [way for way in WAYS[dtype] if kernels.product_way(way) is not None]


def _found(kernels: Kernels, name: str) -> int:
    way = kernels.product_way(name)
    assert way is not None
    return way


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """Rearrange [N, K], padded with zeros to a multiple of 16 columns.

    As [N / 16, K, 16, 1] in float32, [N / 16, K / 2, 16, 2] in bfloat16, and [N / 16, K / 4, 16, 4] in bytes.
    """
    column_count, size = weight.shape
    numbers = 4 // weight.itemsize
    padded = F.pad(weight, (0, 0, 0, -column_count % COLUMNS))
    return padded.view(-1, COLUMNS, size // numbers, numbers).transpose(1, 2).contiguous()


@cache
def best_way(kernels: Kernels, dtype: torch.dtype) -> str:
    """Return the first way that this machine has, unless a later one is clearly faster here."""
    ways = _ways(kernels, dtype)
    if len(ways) == 1:
        return ways[0]
    found = _least_seconds(kernels, ways, dtype)
    chosen = ways[0]
    for way, seconds in found.items():
        if seconds * CLEARLY_FASTER < found[chosen]:
            chosen = way
    return chosen


def _least_seconds(kernels: Kernels, ways: Sequence[str], dtype: torch.dtype) -> dict[str, float]:
    """Return the time of a product by way, the least of some."""
    weights = arranged(torch.ones((_TRIED_SIZE, _TRIED_SIZE), dtype=dtype))
    is_int8 = dtype not in ROW_DTYPES
    rows = torch.ones((_TRIED_ROWS, _TRIED_SIZE), dtype=torch.float32 if is_int8 else dtype)
    scales = torch.ones(_TRIED_SIZE) if is_int8 else None
    found = dict.fromkeys(ways, math.inf)
    # Ways take turns, so that a disturbance of the machine does not meet one alone.
    for _, way in product(range(_TRIALS), ways):
        function, began = _found(kernels, way), time.perf_counter()
        kernels.product(function, rows, weights, None, scales)
        found[way] = min(found[way], time.perf_counter() - began)
    return found
