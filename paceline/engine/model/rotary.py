"""Rotary positions (Su et al., arXiv 2104.09864), in the one form that passes use: halves of a head turn together.

Architectures that turn other numbers of a head together have them reordered, once, in the weights.
"""

from dataclasses import dataclass
from typing import Any

import torch


class Rotary:
    """The model's rotary embedding at every position: cosines and signed sines, [max_length, D] each."""

    def __init__(self, embedding: Any, like: torch.Tensor, max_length: int, head_size: int) -> None:
        """`embedding` is called once; `like` has the dtype and device of the result."""
        cos, sin = (one[0] for one in embedding(like, torch.arange(max_length, device=like.device)[None]))
        self.turned_size = cos.shape[1]
        """How many of a head's numbers turn: the first."""
        half = self.turned_size // 2
        still = torch.zeros((max_length, (head_size - self.turned_size) // 2), dtype=cos.dtype, device=cos.device)
        # The sines carry the sign of the half that is turned backwards. Numbers that do not turn follow in each half.
        self.cos = torch.cat((cos[:, :half], still + 1, cos[:, half:], still + 1), dim=1)
        self.sin = torch.cat((-sin[:, :half], still, sin[:, half:], still), dim=1)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """Return the rotation of positions [T]."""
        return Rotation(self.cos[positions], self.sin[positions])


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding at T positions, the halves of a head turned against each other."""

    cos: torch.Tensor
    """[T, D]"""
    signed_sin: torch.Tensor
    """[T, D]"""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn [H, T, D]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.signed_sin)


def halves_order(head_size: int, turned_size: int, *, turns_neighbours: bool) -> torch.Tensor | None:
    """Return the order of a head's numbers in which i and i + D/2 turn together: [D], or None if that is their order.

    Of D numbers only the first `turned_size` turn; the others are pairs that turn by nothing. Products of queries with
    keys stay the same, because both are reordered.
    """
    numbers = torch.arange(head_size)
    turned, still = numbers[:turned_size], numbers[turned_size:]
    pairs = turned.view(-1, 2).T if turns_neighbours else turned.view(2, -1)
    order = torch.cat((pairs, still.view(2, -1)), dim=1).flatten()
    return None if torch.equal(order, numbers) else order
