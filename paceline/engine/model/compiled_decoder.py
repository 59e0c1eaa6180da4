"""A plain decoder whose passes run a backend's kernels.

The operations between the products, attention too, are so small that torch takes longer to begin than to do them.
"""

from typing import Any

import torch

from paceline.engine.attention.dense import DenseAttention
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.attention.tables import TableAttention
from paceline.engine.backend import LayerKernels
from paceline.engine.interfaces import Attention
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.plain_layer import Layer, Norm


def can_compile(plain: PlainDecoder, kernels: LayerKernels) -> bool:
    """Return whether the kernels can run this decoder."""
    layer = plain.layers[0]
    is_silu = type(layer.activation).__name__ in ("SiLU", "SiLUActivation")
    norms_before = bool(layer.before_attention and layer.before_feed_forward)
    norms_by_head = not layer.query_norm or len(layer.query_norm.weight) == layer.head_size
    return bool(plain.way) and kernels.fits(layer.head_size) and is_silu and norms_before and norms_by_head


class CompiledDecoder:
    def __init__(self, plain: PlainDecoder, kernels: LayerKernels) -> None:
        self.plain = plain
        self._kernels = kernels
        self._dtype = plain.dtype

    @property
    def hidden_size(self) -> int:
        return self.plain.hidden_size

    @property
    def kernels(self) -> str:
        return f"{type(self).__name__} {self.plain.way}, {self._kernels.name}"

    def is_row_independent(self, layout: str) -> bool:
        return self._kernels.is_row_independent(layout)

    @property
    def shares_work(self) -> bool:
        return True

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        rows = self._kernels.rows_of(attention)
        if rows is None:
            return self.plain.logits(token_ids, positions, wanted, attention)
        return self._head(*self._through(token_ids, wanted, attention, rows))

    def features(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None, attention: Attention
    ) -> torch.Tensor:
        rows = self._kernels.rows_of(attention)
        if rows is None:
            return self.plain.features(token_ids, positions, wanted, attention)
        hidden, added = self._through(token_ids, wanted, attention, rows)
        return hidden.add_(added)

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        return self._head(features, None)

    def _head(self, hidden: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        return self.plain.head(self._add_and_norm(hidden, added, self.plain.norm))

    def _through(
        self, token_ids: torch.Tensor, wanted: torch.Tensor | None, attention: Attention, rows: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers; return two parts [W, H] of their output that are still to be added."""
        plain = self.plain
        assert isinstance(attention, PagedAttention | DenseAttention | TableAttention)
        hidden, added = plain.embedded(token_ids), None
        for layer in plain.layers:
            projected = layer.projection(self._add_and_norm(hidden, added, layer.before_attention))
            attended = self._attend(layer, projected, rows, attention.memory(layer.number))
            if layer is plain.layers[-1] and wanted is not None:
                # As in a plain decoder, the last layer's output is needed for the wanted tokens alone.
                hidden, attended = hidden[wanted], attended[wanted]
            added = self._normed(layer.output(attended), layer.after_attention)
            normed = self._add_and_norm(hidden, added, layer.before_feed_forward)
            gated = self._kernels.gate(layer.gate_and_up(normed), self._dtype)
            added = self._normed(layer.down(gated), layer.after_feed_forward)
        assert added is not None
        return hidden, added

    def _add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        assert norm  # see `can_compile`
        return self._kernels.add_and_norm(hidden, added, norm.weight, norm.epsilon, self._dtype)

    def _normed(self, values: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return self._kernels.add_and_norm(values, None, norm.weight, norm.epsilon) if norm else values

    def _attend(
        self, layer: Layer, projected: torch.Tensor, rows: Any, memory: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        norms, epsilon = None, 0.0
        if layer.query_norm and layer.key_norm:
            norms, epsilon = (layer.query_norm.weight, layer.key_norm.weight), layer.query_norm.epsilon
        rotation = self.plain.turns.cos, self.plain.turns.sin
        return self._kernels.attend(rows, projected, *memory, rotation, norms, epsilon, layer.scaling)
