"""Clover with parts left out or changed, as in the paper's ablations. They can be trained, but not served."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.engine.heads.clover import Clover
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.parts import Norm
from paceline.engine.heads.reading import KINDS
from training.features import FrozenTarget
from training.heads import begin, begun_heads


class _Nothing(nn.Module):
    """Takes the place of a layer's attention or MLP, and adds nothing to its input."""

    def __init__(self, *, has_weights: bool) -> None:
        super().__init__()
        self._has_weights = has_weights

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._has_weights else nothing


class _Sum(nn.Module):
    """Adds a token to a state, without a look at how alike they are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.unit = Norm(size, 1e-6, is_trained=False)
        self.value = nn.Linear(size, size)
        nn.init.uniform_(self.value.weight, -0.01, 0.01)
        nn.init.zeros_(self.value.bias)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        made: Tensor = state + self.value(self.unit(embedded))
        return made


class WithoutAttention(Clover):
    kind: ClassVar[str] = "without attention decoder"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(config, draft_count)
        self.decoder = _Sum(config.hidden_size)  # type: ignore[assignment]


class WithoutRegression(Clover):
    """Medusa's heads behind the augmenting block: they know none of the tokens before."""

    kind: ClassVar[str] = "nor regression"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(config, draft_count)
        del self.decoder

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return hidden

    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        return state


class WithoutBlock(Clover):
    kind: ClassVar[str] = "without augmenting block"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(config, draft_count)
        self.body = None


class AttentionBlock(Clover):
    kind: ClassVar[str] = "block of attention alone"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(config, draft_count)
        self.body.layers[0].mlp = _Nothing(has_weights=False)


class MlpBlock(Clover):
    kind: ClassVar[str] = "block of an MLP alone"

    def __init__(self, config: Any, draft_count: int) -> None:
        super().__init__(config, draft_count)
        self.body.layers[0].self_attn = _Nothing(has_weights=True)


VARIANTS: dict[str, type[Clover]] = {
    one.kind: one for one in (WithoutAttention, WithoutRegression, WithoutBlock, AttentionBlock, MlpBlock)
}
NAMES = (*KINDS, *VARIANTS)


def begun(name: str, target: FrozenTarget, draft_count: int) -> HeadsModule:
    """Return untrained heads of a kind or a variant."""
    if name not in VARIANTS:
        return begun_heads(name, target, draft_count)
    heads = VARIANTS[name](target.config, draft_count)
    begin(heads, target)
    return heads


def folder_name(name: str) -> str:
    return name.replace(" ", "-")
