"""Quantised linear layers in place of a module's own.

It owns which layers are quantised: those that become products of a plain decoder, the output head too, or of heads. The
embedding, of which a pass reads a few rows, stays as it is, also where the head shared its weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline.engine.model.forms import FORMS, is_plain_decoder
from paceline.engine.quantization import QuantizedWeight, rounded_rows
from paceline.errors import StartupError
from paceline.types import Quantization


class QuantizedLinear(torch.nn.Module):
    """Multiplies as a linear layer does, by the dequantised weight; rows are rounded first where the weight says so."""

    def __init__(self, layer: Any, *, rounds_rows: bool) -> None:
        super().__init__()
        self.weight = QuantizedWeight.of(layer.weight.detach(), rounds_rows=rounds_rows)
        self.bias = layer.bias

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = rounded_rows(values) if self.weight.rounds_rows else values
        return F.linear(rows, self.weight.dequantized(), self.bias)


def quantize_layers(module: PreTrainedModel, quantization: Quantization) -> None:
    """Replace every linear layer of a plain decoder. Raise StartupError for another architecture."""
    if not is_plain_decoder(module):
        raise StartupError(
            f"--quantization {quantization} cannot be had of {type(module).__name__}: only products of plain decoders "
            f"are quantised ({', '.join(FORMS)}); start with --quantization none"
        )
    quantize_linears(module, rounds_rows=quantization == "w8a8")


def quantize_linears(module: torch.nn.Module, *, rounds_rows: bool) -> None:
    """Replace every linear layer of a module. With `rounds_rows` rows are rounded too."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, QuantizedLinear(child, rounds_rows=rounds_rows))
