"""Taps: what goes into some of a decoder's layers, kept while a pass goes through them."""

from collections.abc import Sequence

import torch


class Taps:
    def __init__(self, layers: Sequence[int]) -> None:
        """`layers` are numbers, from 0; one may come twice."""
        self._layers = layers
        self._found: dict[int, torch.Tensor] = {}

    def note(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep what goes into a layer, [T, H], if it is wanted."""
        if layer in self._layers:
            self._found[layer] = hidden.clone()

    def beside(self, features: torch.Tensor) -> torch.Tensor:
        """Return features [T, H] with what was kept of the same tokens beside them: [T, (1 + layers) * H]."""
        return torch.cat((features, *(self._found[one] for one in self._layers)), dim=1) if self._layers else features
