"""Quantisation to int8 numbers, symmetric about 0: of weights, with a scale for each output column, and of rows.

It owns what a weight and a row become. It does not know which weights of a model are quantised, nor how they are
multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from paceline.types import Quantization

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

LARGEST = 127
"""Largest number of int8 that has a negative one."""
LEAST = 1e-30
"""Rows whose largest number is no larger are rounded to zeros."""
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
    rounds_rows: bool = False
    """Whether rows are rounded there too."""

    @classmethod
    def of(cls, weight: torch.Tensor, *, rounds_rows: bool = False) -> "QuantizedWeight":
        """Quantise [N, K] of floating point."""
        parts = [_quantized(one.float()) for one in torch.split(weight, _COLUMNS_AT_ONCE)]
        numbers, scales = (torch.cat(one) for one in zip(*parts, strict=True))
        return cls(numbers, scales, weight.dtype, rounds_rows)

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> "QuantizedWeight":
        """Join weights of one dtype into one that has their columns side by side."""
        numbers, scales = torch.cat([one.numbers for one in weights]), torch.cat([one.scales for one in weights])
        return cls(numbers, scales, weights[0].dtype, weights[0].rounds_rows)

    def __getitem__(self, columns: torch.Tensor) -> "QuantizedWeight":
        return replace(self, numbers=self.numbers[columns], scales=self.scales[columns])

    def dequantized(self) -> torch.Tensor:
        """Return the weight [N, K] that the numbers stand for, rounded to its dtype."""
        return (self.numbers * self.scales[:, None]).to(self.dtype)


def rounded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., K] as `w8a8` reads them: each number the nearest of 255 that reach to its row's largest."""
    largest = rows.float().abs().amax(dim=-1, keepdim=True)
    # A number over a tensor would be a product with its reciprocal, which is rounded twice.
    inverse = torch.where(largest > LEAST, torch.full_like(largest, LARGEST) / largest, 0.0)
    numbers = (rows.double() * inverse.double()).round().float()  # rounded once, as by a fused multiply and add
    return (numbers * (largest / LARGEST)).to(rows.dtype)


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = weight.abs().amax(dim=1)
    # A column of zeros may have any scale but 0. One with what is no number keeps that, for the check at load to find.
    scales = torch.where(largest == 0, 1.0, largest / LARGEST)
    return (weight / scales[:, None]).round_().to(torch.int8), scales
