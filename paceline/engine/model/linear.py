"""Products of few rows with large weights, of which decoding consists.

On a CPU the products are our own, where they were compiled. Without them, every product over plain float32 weights
rearranges them first; for the six rows of a verify pass that takes as long as the arithmetic. So large weights are
rearranged once, for oneDNN's kernels. Small weights stay as they are: the processor's cache holds them, and a call of
oneDNN takes longer to begin.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.backend import Backend, Product
from paceline.engine.quantization import QuantizedWeight
from paceline.engine.scratch import Memory, new_memory
from paceline.errors import StartupError

ROWS = 16
"""Rows for which the layout is chosen: it serves one row and a whole prompt almost as well."""
PACKED_BYTES = 2**19
"""Least size of a weight to be packed, in a model that the processor's caches may hold."""
LARGE_MODEL_BYTES = 2**24
"""Model size from which weights come from memory in every pass; weights half as large are packed then."""


class Linear:
    """A weight [out, in], packed where that pays, and a bias [out] or none. Rows may depend on each other."""

    way = ""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, packed_bytes: int) -> None:
        self._is_packed = _pays(weight, packed_bytes)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._is_packed else weight
        self._bias = bias

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Turn [..., in] into [..., out], in float32 whatever the weight's dtype, in which it multiplies."""
        if not self._is_packed:
            return F.linear(values.to(self._weight.dtype), self._weight, self._bias).float()
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            values, self._weight, self._bias, "none", [], ""
        )
        return product


class PackedLayer(torch.nn.Module):
    """Replaces a linear layer among a model's own modules."""

    def __init__(self, layer: Any, packed_bytes: int) -> None:
        super().__init__()
        weight, bias = _taken(layer)
        assert isinstance(weight, torch.Tensor)  # only plain decoders are quantised
        self._linear = Linear(weight, bias, packed_bytes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._linear(values)


def least_packed_bytes(module: torch.nn.Module) -> int:
    """Return the least size of a weight that is worth packing in this model."""
    model_bytes = sum(one.nbytes for one in module.parameters())
    return PACKED_BYTES // 2 if model_bytes >= LARGE_MODEL_BYTES else PACKED_BYTES


def take(*layers: Any, backend: Backend, packed_bytes: int, order: torch.Tensor | None = None) -> Product:
    """Join layers into one whose outputs are theirs side by side, or in `order`.

    It is multiplied by as the backend does it; by torch if that cannot, packed from `packed_bytes` on. Quantised
    weights that it cannot multiply by are dequantised. Raise StartupError where rows are to be rounded too.
    """
    weights, found = zip(*map(_taken, layers), strict=True)
    biases = [bias for bias in found if bias is not None]
    assert len(biases) in (0, len(layers))
    weight, bias = _joined(weights), torch.cat(biases) if biases else None
    if order is not None:
        weight, bias = weight[order], None if bias is None else bias[order]
    if isinstance(weight, QuantizedWeight):
        if product := backend.pack_quantized(weight, bias):
            return product
        if weight.rounds_rows:
            raise StartupError(
                f"--quantization w8a8 cannot be had here of a weight of {weight.dtype} whose rows have "
                f"{weight.numbers.shape[1]} numbers: it takes an x86 CPU with AVX2 and the compiled kernels, float32 "
                "or bfloat16, and multiples of 16; start with --quantization int8 or none"
            )
        weight = weight.dequantized()
    return backend.pack(weight, bias) or Linear(weight, bias, packed_bytes)


def _taken(layer: Any) -> tuple[torch.Tensor | QuantizedWeight, torch.Tensor | None]:
    """Return a layer's weight and bias, which it loses, so that a model is never held twice."""
    weight, bias = layer.weight, None if layer.bias is None else layer.bias.detach()
    layer.weight = layer.bias = None
    return weight if isinstance(weight, QuantizedWeight) else weight.detach(), bias


def _joined(weights: Sequence[torch.Tensor | QuantizedWeight]) -> torch.Tensor | QuantizedWeight:
    if len(weights) == 1:
        return weights[0]
    if quantized := [one for one in weights if isinstance(one, QuantizedWeight)]:
        return QuantizedWeight.joined(quantized)
    return torch.cat([one for one in weights if isinstance(one, torch.Tensor)])


def pack_layers(module: torch.nn.Module) -> None:
    """Replace every linear layer that is worth packing by a packed one."""
    packed_bytes = least_packed_bytes(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and _pays(child.weight, packed_bytes):
                setattr(parent, name, PackedLayer(child, packed_bytes))


def _pays(weight: torch.Tensor, packed_bytes: int) -> bool:
    can_pack = weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return can_pack and weight.nbytes >= packed_bytes
