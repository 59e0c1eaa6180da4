"""EAGLE (Li et al., arXiv 2401.15077): a layer that goes on with the target's features, one token after another.

Its features are those behind the target's last norm, and so is what it makes: the target's head reads that as it is.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import Norm, new_body


class Eagle(HeadsModule):
    kind: ClassVar[str] = "eagle"
    repeats_layers: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        draft_count: int,
        *,
        has_bias: bool = True,
        has_norm: bool = True,
        has_layer_norms: bool = False,
    ) -> None:
        """Without `has_norm` the target's last norm is used. With `has_layer_norms` all that is read has a norm."""
        super().__init__(draft_count)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.norm: Callable[[Tensor], Tensor] | None = Norm(size, epsilon) if has_norm else None
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.body = new_body(config, 1)
        self.embedded_norm: nn.Module = Norm(size, epsilon) if has_layer_norms else nn.Identity()
        self.output_norm: nn.Module = Norm(size, epsilon) if has_layer_norms else nn.Identity()
        if not has_layer_norms:
            self.body.layers[0].input_layernorm = nn.Identity()
        self._settings = {"has_bias": has_bias, "has_norm": has_norm, "has_layer_norms": has_layer_norms}

    def take_target(self, norm: Callable[[Tensor], Tensor], layer_count: int) -> None:
        self.norm = self.norm or norm

    def enter(self, features: Tensor, embedded: Tensor) -> Tensor:
        assert self.norm
        return self.follow(self.norm(features), embedded)

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        entering: Tensor = self.fc(torch.cat((self.embedded_norm(embedded), state), dim=-1))
        return entering

    def output(self, state: Tensor, place: int) -> Tensor:
        made: Tensor = self.output_norm(state)
        return made

    def settings(self) -> dict[str, Any]:
        return super().settings() | self._settings
