"""What a source without a model gives for one generation: tokens that may follow, and what speaks for them."""

from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.committed_tokens import TokenList


@dataclass(slots=True)
class Guess:
    token_ids: tuple[int, ...]
    """Tokens that may follow the committed ones; at least one."""
    match_length: int
    """Latest committed tokens that stand before the earlier place too, as far as they were compared."""
    shares: tuple[float, ...]
    """For each token: of the earlier places that went on like the guess so far, the share that goes on with it."""


class Guesser(Protocol):
    """What one source knows of one generation."""

    def read(self, context: TokenList) -> None:
        """Take in `context`, which the first guess would do else. Any thread may call it, before the first guess."""
        ...

    def guess(self, context: TokenList, most: int) -> Guess | None:
        """Return at most `most` tokens that may follow `context`, all committed tokens; None: nothing suggests any."""
        ...

    def ended(self, context: TokenList) -> None:
        """Take note of the whole text of a generation that ended."""
        ...
