"""Products of few rows with large weights, which is what decoding is.

In float32 on a CPU, every product over plain weights rearranges them first, and for the six rows of a verify that takes
as long as the arithmetic. Here large weights are rearranged once, as oneDNN's kernels read them. Small ones stay as
they are: the processor's cache holds them, and a call of oneDNN takes longer to begin.
"""

from typing import Any

import torch
import torch.nn.functional as F

ROWS = 16
"""What the layout is chosen for: that for a few rows serves one row and a whole prompt almost as well."""
PACKED_BYTES = 2**19
"""Least size of weights that are packed in a model that the processor's caches may hold."""
LARGE_MODEL_BYTES = 2**24
"""From here on weights come from memory in every pass, and half as large ones are packed."""


class Linear:
    """A weight [out, in], packed where that pays, and a bias [out] or none."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, packed_bytes: int) -> None:
        self._is_packed = _pays(weight, packed_bytes)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self._is_packed else weight
        self._bias = bias

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        if not self._is_packed:
            return F.linear(values, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            values, self._weight, self._bias, "none", [], ""
        )
        return product


class PackedLayer(torch.nn.Module):
    """Stands for a linear layer among a model's own modules."""

    def __init__(self, layer: Any, packed_bytes: int) -> None:
        super().__init__()
        self._linear = take(layer, packed_bytes=packed_bytes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._linear(values)


def least_packed_bytes(module: torch.nn.Module) -> int:
    """From which size on it pays to pack weights of the model."""
    model_bytes = sum(one.nbytes for one in module.parameters())
    return PACKED_BYTES // 2 if model_bytes >= LARGE_MODEL_BYTES else PACKED_BYTES


def take(*layers: Any, packed_bytes: int) -> Linear:
    """One linear whose outputs are those of the layers side by side, packed from so many bytes on.

    The layers lose their weights, so that a model is never held twice.
    """
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers))
    for layer in layers:
        layer.weight = layer.bias = None
    if len(layers) == 1:
        return Linear(weights[0], biases[0] if biases else None, packed_bytes)
    return Linear(torch.cat(weights), torch.cat(biases) if biases else None, packed_bytes)


def pack_layers(module: torch.nn.Module) -> None:
    """Put a packed layer in the place of every linear one of which that makes something better."""
    packed_bytes = least_packed_bytes(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and _pays(child.weight, packed_bytes):
                setattr(parent, name, PackedLayer(child, packed_bytes))


def _pays(weight: torch.Tensor, packed_bytes: int) -> bool:
    can_pack = weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return can_pack and weight.nbytes >= packed_bytes
