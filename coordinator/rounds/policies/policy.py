"""What a policy is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.generation import Generation


@dataclass(frozen=True)
class Selection:
    generations: list[Generation]
    is_fallback: bool = False
    """The policy looked for a better group and found none."""


class Policy(Protocol):
    def live_limit(self, batch_size: int, lanes: int) -> int:
        """Generations it wants live, and cached, at once."""
        ...

    def select(self, window: Sequence[Generation], batch_size: int) -> Selection:
        """Choose 1 to `batch_size` generations of a window that is not empty, least recently served first.

        May choose none when the generations it waits for are in flight.
        """
        ...
