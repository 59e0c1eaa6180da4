"""What a kind of heads is: from the target's features and the tokens after them to what the target's head reads.

Features are what goes into the target's last norm. A kind is a module, so that training and passes share its
arithmetic. It knows nothing of vocabularies, caches and sequences; leading dimensions may be any.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class HeadsModule(nn.Module, ABC):
    kind: ClassVar[str]
    """Its name in the files of heads."""
    token_ids: Tensor
    """Tokens that its own head knows, [N]."""
    repeats_layers: ClassVar[bool] = False
    """Whether each further draft goes through the layers, behind the tokens before it."""
    looks_back: ClassVar[bool] = True
    """Whether a draft depends on the drafts before it."""
    reads_embeddings: ClassVar[bool] = False
    """Whether the first layer's attention reads embeddings too, which stand before the rest of what `enter` returns."""

    def __init__(self, draft_count: int) -> None:
        """`draft_count` is the most tokens that are drafted after one. Raise ValueError or TypeError for no number."""
        super().__init__()
        if not range(draft_count):
            raise ValueError(f"draft_count is {draft_count}; give at least 1")
        self.draft_count = draft_count
        self.body: Any = None
        """Layers that keep keys and values, as transformers' model of the target's architecture; None without any."""
        self.tapped_layers: tuple[int, ...] = ()
        """Layers of the target of which what goes in stands behind the features, [..., (1 + layers) * H]."""
        self.head: Any = None
        """A head of its own, a linear layer; None for the target's."""

    def take_target(self, norm: Callable[[Tensor], Tensor], layer_count: int) -> None:
        """Take from the target what files of heads may leave out: its last norm, and which of its layers are tapped."""

    def enter(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Return what goes into the layers, [..., H], from features [..., H] of tokens.

        `embedded` [..., H] are the embeddings of the tokens that follow them.
        """
        return features

    def leave(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the state from which the first token is drafted, from what the layers made of `enter`'s result."""
        return hidden

    @abstractmethod
    def follow(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the state after one more token, with this embedding.

        With `repeats_layers` it goes through the layers and `leave` before the next token is drafted.
        """

    @abstractmethod
    def output(self, state: Tensor, place: int) -> Tensor:
        """Return what the target's head reads, [..., H], for the draft at `place`, from 0."""

    def settings(self) -> dict[str, Any]:
        """Return what the file of heads says beside the weights; the constructor takes the same."""
        return {"draft_count": self.draft_count}
