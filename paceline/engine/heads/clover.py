"""Clover (Xiao et al., arXiv 2405.00263): heads that look at what was drafted before, behind a layer of their own.

The augmenting block is one layer of the target's architecture over all tokens. From its result the attention decoder
goes from token to token, beginning with the one that the target chose. The published one looks at rows of the target's
head; this one looks at its embeddings, which are kept apart anyway.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import AttentionDecoder, Norm, ResidualBlock, new_body


class Clover(HeadsModule):
    kind: ClassVar[str] = "clover"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(draft_count)
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.body = new_body(config, 1)
        self.decoder = AttentionDecoder(size, config.num_attention_heads, epsilon, by_cosine=False)
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(draft_count))
        self.norm = Norm(size, epsilon)

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.decoder(hidden, embedded)

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        return self.decoder(state, embedded)

    def output(self, state: Tensor, place: int) -> Tensor:
        return self.norm(self.blocks[place](state))
