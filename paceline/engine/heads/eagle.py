"""EAGLE (Li et al., arXiv 2401.15077): a layer that goes on with the target's features, one token after another.

Its features are those behind the target's last norm, and so is what it makes: the target's head reads that as it is.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import Norm, new_body


class Eagle(HeadsModule):
    kind: ClassVar[str] = "eagle"
    repeats_layers: ClassVar[bool] = True

    def __init__(self, config: Any, draft_count: int, *, has_bias: bool = True) -> None:
        super().__init__(draft_count)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.body = new_body(config, 1)
        self.body.layers[0].input_layernorm = nn.Identity()

    def enter(self, features: Tensor, embedded: Tensor) -> Tensor:
        return self.follow(self.norm(features), embedded)

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        entering: Tensor = self.fc(torch.cat((embedded, state), dim=-1))
        return entering

    def output(self, state: Tensor, place: int) -> Tensor:
        return state

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"has_bias": self.fc.bias is not None}
