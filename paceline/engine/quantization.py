"""Weight-only quantisation: int8 numbers, symmetric about 0, and a scale for each output column.

It owns what a weight becomes. It does not know which weights of a model are quantised, nor how they are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Quantization = Literal["none", "int8"]

LARGEST = 127
"""Largest number of int8 that has a negative one."""
_COLUMNS_AT_ONCE = 4096
"""Columns that are quantised at a time, so that no large weight is held in float32 too."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K] of a linear layer."""

    numbers: torch.Tensor
    """[N, K] of int8"""
    scales: torch.Tensor
    """[N] of float32, by which a column's numbers are multiplied"""
    dtype: torch.dtype
    """Dtype that the weight had, and that rows still have where they enter the product."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> "QuantizedWeight":
        """Quantise [N, K] of floating point."""
        parts = [_quantized(one.float()) for one in torch.split(weight, _COLUMNS_AT_ONCE)]
        numbers, scales = (torch.cat(one) for one in zip(*parts, strict=True))
        return cls(numbers, scales, weight.dtype)

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Join weights of one dtype into one that has their columns side by side."""
        numbers, scales = torch.cat([one.numbers for one in weights]), torch.cat([one.scales for one in weights])
        return cls(numbers, scales, weights[0].dtype)

    def __getitem__(self, columns: torch.Tensor) -> "QuantizedWeight":
        return QuantizedWeight(self.numbers[columns], self.scales[columns], self.dtype)

    def dequantized(self) -> torch.Tensor:
        """Return the weight [N, K] that the numbers stand for, rounded to its dtype."""
        return (self.numbers * self.scales[:, None]).to(self.dtype)


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(dim=1)
    # A column of zeros may have any scale but 0.
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (weight / scales[:, None]).round_().to(torch.int8), scales
