"""Layers of a plain decoder, run by a backend's kernels.

The operations between the products, attention too, are so small that torch takes longer to begin than to do them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from paceline.engine.attention.dense import DenseAttention
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.attention.tables import TableAttention
from paceline.engine.backend import LayerKernels
from paceline.engine.interfaces import Attention
from paceline.engine.model.plain_layer import Layer, Norm
from paceline.engine.model.rotary import Rotary
from paceline.engine.model.taps import Taps
from paceline.engine.scratch import Memory, Scratch, new_memory

CompiledAttention = PagedAttention | DenseAttention | TableAttention
"""Attention whose memory kernels read."""


def can_compile(layers: Sequence[Layer], kernels: LayerKernels) -> bool:
    """Return whether the kernels can run these layers."""
    layer = layers[0]
    is_silu = type(layer.activation).__name__ in ("SiLU", "SiLUActivation")
    norms_by_head = not layer.query_norm or len(layer.query_norm.weight) == layer.head_size
    is_norm_before = layer.before_feed_forward is not None
    has_norms = all(own.before_attention for own in layers[1:])
    has_products = has_norms and all(one.way for own in layers for one in own.products)
    return has_products and kernels.fits(layer.head_size) and is_silu and is_norm_before and norms_by_head


class CompiledLayers:
    def __init__(self, layers: Sequence[Layer], rotary: Rotary, kernels: LayerKernels) -> None:
        """The kernels can run the layers: see `can_compile`."""
        self._layers = layers
        self._rotary = rotary
        self._kernels = kernels
        self._dtype = layers[0].dtype
        self._scratch = Scratch()

    def through(
        self,
        hidden: torch.Tensor,
        wanted: torch.Tensor | None,
        attention: Attention,
        rows: Any,
        taps: Taps | None = None,
        beside: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run [T, H], which this uses up; return two parts [W, H] of the output that are still to be added.

        The second lies in memory that the next call uses.

        `rows` are the attention's, as the kernels read them. The first layer's attention reads `beside` [T, H] too.
        """
        assert isinstance(attention, CompiledAttention)
        added: torch.Tensor | None = None
        room = self._scratch.room
        for number, layer in enumerate(self._layers):
            entering = hidden
            if layer.before_attention:
                entering = self.add_and_norm(hidden, added, layer.before_attention, room("normed"))
            elif hidden.dtype != self._dtype:
                entering = self._kernels.copied(hidden, self._dtype, room("normed"))
            if taps:
                taps.note(number, hidden)
            if beside is not None and not number:
                entering = torch.cat((beside.to(entering.dtype), entering), dim=1)
            projected = layer.projection(entering, room("projected"))
            is_last = layer is self._layers[-1] and wanted is not None
            attended = self._attend(layer, projected, rows, attention, is_last=is_last)
            if is_last and wanted is not None:
                # As in a plain decoder, the last layer's output is needed for the wanted tokens alone.
                # Callers keep the former.
                hidden = self._kernels.take(hidden, wanted)
                attended = self._kernels.take(attended, wanted, room("attended of wanted"))
            added = self._normed(layer.output(attended, room("added")), layer.after_attention)
            assert layer.before_feed_forward  # see `can_compile`
            normed = self.add_and_norm(hidden, added, layer.before_feed_forward, room("normed"))
            gated = self._kernels.gate(layer.gate_and_up(normed, room("gate and up")), self._dtype, room("gated"))
            added = self._normed(layer.down(gated, room("added")), layer.after_feed_forward)
        assert added is not None
        return hidden, added

    def add_and_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, norm: Norm, memory: Memory = new_memory
    ) -> torch.Tensor:
        return self._kernels.add_and_norm(hidden, added, norm.weight, norm.epsilon, self._dtype, memory)

    def _normed(self, values: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return values
        return self._kernels.add_and_norm(values, None, norm.weight, norm.epsilon, memory=self._scratch.room("output"))

    def _attend(
        self, layer: Layer, projected: torch.Tensor, rows: Any, attention: CompiledAttention, *, is_last: bool
    ) -> torch.Tensor:
        norms, epsilon = None, 0.0
        if layer.query_norm and layer.key_norm:
            norms, epsilon = (layer.query_norm.weight, layer.key_norm.weight), layer.query_norm.epsilon
        rotation = self._rotary.cos, self._rotary.sin
        room = self._scratch.room("attended")
        memory = attention.memory(layer.number)
        return self._kernels.attend(
            rows, projected, *memory, rotation, norms, epsilon, layer.scaling, room, is_last=is_last
        )
