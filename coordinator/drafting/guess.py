"""What a source without a model gives for one row: tokens that may follow, and what speaks for them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guess:
    token_ids: tuple[int, ...]
    """Tokens that may follow the committed ones; at least one."""
    match_length: int
    """Latest committed tokens that stand before the earlier place too, as far as they were compared."""
    shares: tuple[float, ...]
    """For each token: of the earlier places that went on like the guess so far, the share that goes on with it."""
