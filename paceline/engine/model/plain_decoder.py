"""A plain decoder that runs torch's operations on the weights, without the modules between.

On a CPU, calling the modules of a small model takes longer than the arithmetic: two thirds of a verify pass of six
tokens through the built-in target. Numbers are rounded to the dtype of the weights where they enter a product or the
cache; sums, norms and positions are float32.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline.engine.attention.longest import max_length_of
from paceline.engine.backend import Backend
from paceline.engine.interfaces import Attention
from paceline.engine.model.forms import FORMS
from paceline.engine.model.linear import take
from paceline.engine.model.plain_layer import Layer, Norm
from paceline.engine.model.rotary import Rotary
from paceline.engine.model.taps import LayeredDecoder, Taps


class PlainDecoder(LayeredDecoder):
    def __init__(self, module: PreTrainedModel, backend: Backend, packed_bytes: int) -> None:
        """Take the weights of a module whose architecture is among `FORMS`, for products of the backend.

        Weights from `packed_bytes` on are worth packing; see `linear`.
        """
        model: Any = module
        form, config = FORMS[type(module).__name__], module.config
        taken = partial(take, backend=backend, packed_bytes=packed_bytes)
        embedding = model.get_input_embeddings().weight.detach()
        # A copy: a weight of a mapped file keeps all of the file in memory, beside the packed weights.
        self.embedding = embedding.clone() if embedding.device.type == "cpu" else embedding
        like = torch.empty(0, device=self.embedding.device)
        head_size = model.model.layers[0].self_attn.head_dim
        self.rotary = Rotary(model.model.rotary_emb, like, max_length_of(config), head_size)
        self.layers = [
            Layer(layer, number, form, self.rotary.turned_size, taken)
            for number, layer in enumerate(model.model.layers)
        ]
        self.norm = Norm(model.model.norm.weight.detach(), model.model.norm.variance_epsilon)
        self.head = taken(model.get_output_embeddings())

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        return self.logits_of(self.through(self.embedded(token_ids), positions, wanted, attention))

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(features))

    def through(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        attention: Attention,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        turn = self.rotary.at(positions[0])
        for number, layer in enumerate(self.layers):
            if taps:
                taps.note(number, hidden)
            # For a prompt's other tokens the last layer only has to store keys and values.
            hidden = layer(hidden, turn, attention, wanted if layer is self.layers[-1] else None)
        return hidden

    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids[0], self.embedding).float()

    @property
    def hidden_size(self) -> int:
        size: int = self.embedding.shape[1]
        return size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of the cache."""
        dtype: torch.dtype = self.embedding.dtype
        return dtype

    @property
    def way(self) -> str:
        """The way in which every product is made, so that a result depends on no other row; empty without one."""
        ways = {self.head.way, *(one.way for layer in self.layers for one in layer.products)}
        return ways.pop() if len(ways) == 1 else ""

    @property
    def kernels(self) -> str:
        return " ".join([type(self).__name__, *filter(None, [self.way])])

    @property
    def shares_work(self) -> bool:
        return False

    def is_row_independent(self, layout: str) -> bool:
        return False  # torch's other operations may round otherwise with more rows
