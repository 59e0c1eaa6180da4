"""A loaded model, and how a packed row goes through it."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paceline.engine.kv_cache import Attention, KvShape
from paceline.types import ModelDescription, TokenizerFiles


@dataclass(frozen=True)
class LoadedModel:
    module: PreTrainedModel
    description: ModelDescription
    kv_shape: KvShape
    tokenizer: TokenizerFiles | None

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run one packed row: `token_ids` and `positions` [1, T], `wanted` [W] indices into T. Returns [W, V]."""
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            packed_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
