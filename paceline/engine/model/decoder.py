"""How a packed row goes through a model: by the model's own modules, or straight through their weights.

For architectures that are known to be the same plain decoder, the second way calls the same operations on the same
weights, or, where they were built, compiled ones. Which way is right is seen at load: `self_check` compares with the
model's own forward.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_decoder import CompiledDecoder, can_compile
from paceline.engine.model.linear import pack_layers
from paceline.engine.model.plain_decoder import PLAIN_DECODERS, PlainDecoder
from paceline.engine.native import find_kernels


class Decoder(Protocol):
    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run one packed row: `token_ids` and `positions` [1, T], `wanted` [W] indices into T. Returns [W, V]."""
        ...


def make_decoder(module: PreTrainedModel) -> Decoder:
    """The module is used up: a plain decoder takes its weights."""
    if type(module).__name__ not in PLAIN_DECODERS or module.dtype != torch.float32:
        pack_layers(module)
        return ModuleDecoder(module)
    plain = PlainDecoder(module)
    kernels = find_kernels() if can_compile(plain) else None
    return CompiledDecoder(plain, kernels) if kernels else plain


@dataclass(frozen=True)
class ModuleDecoder:
    """The model's own forward, whose attention is the engine's."""

    module: PreTrainedModel

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            packed_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
