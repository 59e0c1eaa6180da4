"""A plain decoder whose passes run a backend's kernels: see `compiled_layers`."""

import torch

from paceline.engine.backend import LayerKernels
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_layers import CompiledLayers, can_compile
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.taps import LayeredDecoder, Taps


def can_compile_decoder(plain: PlainDecoder, kernels: LayerKernels) -> bool:
    """Return whether the kernels can run this decoder."""
    return bool(plain.way) and bool(plain.layers[0].before_attention) and can_compile(plain.layers, kernels)


class CompiledDecoder(LayeredDecoder):
    def __init__(self, plain: PlainDecoder, kernels: LayerKernels) -> None:
        self.plain = plain
        self._kernels = kernels
        self._layers = CompiledLayers(plain.layers, plain.rotary, kernels)

    @property
    def hidden_size(self) -> int:
        return self.plain.hidden_size

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.plain.embedded(token_ids)

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
        return self._head(*self._layers.through(self.plain.embedded(token_ids), wanted, attention, rows))

    def through(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        attention: Attention,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        rows = self._kernels.rows_of(attention)
        if rows is None:
            return self.plain.through(hidden, positions, wanted, attention, taps)
        hidden, added = self._layers.through(hidden, wanted, attention, rows, taps)
        return hidden.add_(added)

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        return self._head(features, None)

    def _head(self, hidden: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        return self.plain.head(self._layers.add_and_norm(hidden, added, self.plain.norm))
