"""EAGLE-3 (Li et al., arXiv 2503.01840): EAGLE over what goes into three of the target's layers, with its own head.

Its layer's attention reads the token's embedding beside the state. Its head knows some of the target's tokens only.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import Norm, new_body


class Eagle3(HeadsModule):
    kind: ClassVar[str] = "eagle3"
    repeats_layers: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        draft_count: int,
        *,
        vocabulary_size: int,
        tapped_layers: Sequence[int] | None = None,
        is_residual_normed: bool = False,
        has_input_norm: bool = False,
        has_tap_norms: bool = False,
        is_state_normed: bool = False,
    ) -> None:
        """`config` is the layer's. The head knows `vocabulary_size` tokens. By default layers 2, n / 2 and n - 3 of n
        are tapped. The residual goes around the norm before attention, unless `is_residual_normed`.

        EAGLE 3.1 has a norm for each tapped layer, and the next token's state is what its head reads.
        """
        super().__init__(draft_count)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.tapped_layers = tuple(tapped_layers or ())
        tap_count = len(self.tapped_layers) or 3
        self.input_norm: nn.Module = Norm(tap_count * size, epsilon) if has_input_norm else nn.Identity()
        self.fc_norm = nn.ModuleList(Norm(size, epsilon) for _ in range(tap_count if has_tap_norms else 0))
        self.fc = nn.Linear(tap_count * size, size, bias=False)
        self.embedded_norm, self.norm = Norm(size, epsilon), Norm(size, epsilon)
        self._is_state_normed = is_state_normed
        self.body = new_body(config, 1)
        attention = self.body.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * size, linear.out_features, bias=linear.bias is not None))
        self.hidden_norm: nn.Module = nn.Identity()
        if is_residual_normed:
            self.hidden_norm, self.body.layers[0].input_layernorm = Norm(size, epsilon), nn.Identity()
        self.head = nn.Linear(size, vocabulary_size, bias=False)
        self.register_buffer("token_ids", torch.arange(vocabulary_size))

    def take_target(self, norm: Callable[[Tensor], Tensor], layer_count: int) -> None:
        self.tapped_layers = self.tapped_layers or (2, layer_count // 2, layer_count - 3)

    def enter(self, features: Tensor, embedded: Tensor) -> Tensor:
        size = embedded.shape[-1]
        tapped = self.input_norm(features[..., size:])
        if self.fc_norm:
            parts = zip(self.fc_norm, tapped.chunk(len(self.fc_norm), dim=-1), strict=True)
            tapped = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.follow(self.fc(tapped), embedded)

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(hidden) if self._is_state_normed else hidden

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat((self.embedded_norm(embedded), self.hidden_norm(state)), dim=-1)

    def output(self, state: Tensor, place: int) -> Tensor:
        return state if self._is_state_normed else self.norm(state)
