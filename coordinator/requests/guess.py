"""Tokens that a source without a model has at hand for a generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may follow those of a generation, because they followed the same tokens before."""

    token_ids: tuple[int, ...]
    match_length: int
    """Tokens before them that were found at the earlier places."""
    shares: tuple[float, ...]
    """For each token, the share of the earlier places that still agree which go on with it."""


class Guesser(Protocol):
    """What one source knows of one generation."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that were committed."""
        ...

    def guess(self, most: int) -> Guess | None:
        """Return up to `most` tokens that may follow; None when nothing suggests any."""
        ...
