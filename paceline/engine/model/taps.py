"""Features: what goes into a decoder's last norm, and into some of its layers, as a pass computes it anyway."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from paceline.engine.interfaces import Attention


class Taps:
    def __init__(
        self, layers: Sequence[int], copied: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    ) -> None:
        """`layers` are numbers, from 0; one may come twice. `copied` keeps what goes in, which the pass uses up."""
        self.layers = tuple(layers)
        self._copied = copied
        self._found: dict[int, torch.Tensor] = {}

    def note(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep what goes into a layer, [T, H], if it is wanted."""
        if layer in self.layers:
            self._found[layer] = self._copied(hidden)

    def beside(self, features: torch.Tensor) -> torch.Tensor:
        """Return features [T, H] with what was kept of the first T tokens beside them: [T, (1 + layers) * H]."""
        tapped = [self._found[one][: len(features)] for one in self.layers]
        return torch.cat((features, *tapped), dim=1) if tapped else features


class LayeredDecoder(ABC):
    """A decoder whose layers are run apart from its head."""

    @abstractmethod
    def embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors [T, hidden size] of [1, T]."""

    @abstractmethod
    def through(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        attention: Attention,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """Run the layers on [T, H], which may be used up; return [W, H], or [T, H] if `wanted` is None."""

    @abstractmethod
    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        """Turn features [W, H], which stay as they are, into logits [W, V]."""

    def logits_and_features(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: Attention,
        taps: Taps | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed row as `FeatureDecoder` says."""
        hidden = self.embedded(token_ids)
        if taps is None:
            features = self.through(hidden, positions, wanted, attention)
            return self.logits_of(features), features
        features = self.through(hidden, positions, None, attention, taps)
        return self.logits_of(features[wanted]), taps.beside(features)
