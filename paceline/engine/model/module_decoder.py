"""The way of a packed row through a model's own modules, which call the engine's attention."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paceline.engine.interfaces import Attention


@dataclass(frozen=True)
class ModuleDecoder:
    """The model's own forward with the engine's attention."""

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

    @property
    def kernels(self) -> str:
        return type(self).__name__

    @property
    def shares_work(self) -> bool:
        return False

    def is_row_independent(self, layout: str) -> bool:
        return False
