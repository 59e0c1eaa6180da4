"""Medusa-1 (Cai et al., arXiv 2401.10774): a head for each place, none of which knows what the others draft."""

from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import Norm, ResidualBlock


class Medusa(HeadsModule):
    kind: ClassVar[str] = "medusa"
    looks_back: ClassVar[bool] = False

    def __init__(self, config: Any, draft_count: int) -> None:
        """`config` is the target's, of transformers."""
        super().__init__(draft_count)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(draft_count))

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.norm(hidden)

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        return state

    def output(self, state: Tensor, place: int) -> Tensor:
        made: Tensor = self.blocks[place](state)
        return made
