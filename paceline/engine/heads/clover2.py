"""Clover-2 (Xiao et al., arXiv 2408.00264): the attention decoder stands before an augmenting block of two layers too.

So each token's place knows the token after it. One projector serves all places after the first.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import AttentionDecoder, Norm, new_body

LAYERS = 2


class Clover2(HeadsModule):
    kind: ClassVar[str] = "clover2"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(draft_count)
        size, head_count, epsilon = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        self.before = AttentionDecoder(size, head_count, epsilon, by_cosine=True)
        self.body = new_body(config, LAYERS)
        self.decoder = AttentionDecoder(size, head_count, epsilon, by_cosine=True)
        self.first, self.later = nn.Linear(size, size), nn.Linear(2 * size, size)
        for linear in (self.first, self.later):
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.body_norm, self.norm = Norm(size, epsilon), Norm(size, epsilon)

    def enter(self, features: Tensor, embedded: Tensor) -> Tensor:
        return self.before(features, embedded)

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat((self.body_norm(hidden), embedded), dim=-1)

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        # The token stands beside the state, because the projector reads both.
        hidden, _ = state.chunk(2, dim=-1)
        return torch.cat((self.decoder(hidden, embedded), embedded), dim=-1)

    def output(self, state: Tensor, place: int) -> Tensor:
        return self.norm(self.later(state) if place else self.first(state.chunk(2, dim=-1)[0]))
