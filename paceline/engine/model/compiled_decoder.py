"""A plain decoder whose passes on one thread run compiled operations between the products.

The products stay with torch, which runs them near the processor's peak. All other operations, attention too, are so
small that torch takes longer to begin than to do them. With more threads torch runs them too, as it shares them out.
"""

import torch
import torch.nn.functional as F

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention
from paceline.engine.model.plain_decoder import Layer, Norm, PlainDecoder
from paceline.engine.native import HEAD_SIZES, Kernels, PassRows


def can_compile(plain: PlainDecoder) -> bool:
    """Return whether the kernels can run this decoder."""
    layer, cos = plain.layers[0], plain.turns.cos
    is_silu = type(layer.activation).__name__ in ("SiLU", "SiLUActivation")
    turns_whole_heads = (
        cos.shape[1] == layer.head_size and cos.dtype == torch.float32 == layer.attention_norm.weight.dtype
    )
    return cos.device.type == "cpu" and layer.head_size in HEAD_SIZES and turns_whole_heads and is_silu


class CompiledDecoder:
    def __init__(self, plain: PlainDecoder, kernels: Kernels) -> None:
        self.plain = plain
        self._kernels = kernels

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        if torch.get_num_threads() > 1 or not isinstance(attention, PagedAttention) or not _is_readable(attention):
            return self.plain.logits(token_ids, positions, wanted, attention)
        plain, rows = self.plain, PassRows(attention.spans, attention.segments)
        if rows.longest > plain.turns.cos.shape[0]:
            raise IndexError(f"a sequence of {rows.longest} tokens has no positions beyond {plain.turns.cos.shape[0]}")
        hidden, added = F.embedding(token_ids[0], plain.embedding), None
        for layer in plain.layers:
            projected = layer.projection(self._add_and_norm(hidden, added, layer.attention_norm))
            attended = self._attend(layer, projected, rows, attention)
            if layer is plain.layers[-1]:
                # As in a plain decoder, the last layer's output is needed for the wanted tokens alone.
                hidden, attended = hidden[wanted], attended[wanted]
            normed = self._add_and_norm(hidden, layer.output(attended), layer.feed_forward_norm)
            added = layer.down(self._kernels.gate(layer.gate_and_up(normed)))
        return plain.head(self._add_and_norm(hidden, added, plain.norm))

    def _add_and_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self._kernels.add_and_norm(hidden, added, norm.weight, norm.epsilon)

    def _attend(self, layer: Layer, projected: torch.Tensor, rows: PassRows, attention: PagedAttention) -> torch.Tensor:
        norms, epsilon = None, 0.0
        if layer.query_norm and layer.key_norm:
            norms, epsilon = (layer.query_norm.weight, layer.key_norm.weight), layer.query_norm.epsilon
        keys, values = attention.memory(layer.number)
        rotation = self.plain.turns.cos, self.plain.turns.sin
        return self._kernels.attend(rows, projected, keys, values, rotation, norms, epsilon, layer.scaling)


def _is_readable(attention: PagedAttention) -> bool:
    """Return whether the cache is float32 in a CPU's memory, as the kernels assume; unlike torch they do not check."""
    keys, _ = attention.memory(0)
    return keys.device.type == "cpu" and keys.dtype == torch.float32
