"""The protocol of a policy, and its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.generation import Generation


@dataclass(frozen=True)
class Selection:
    generations: list[Generation]
    is_fallback: bool = False
    """Whether the policy looked for a better group and found none."""


class Policy(Protocol):
    def live_limit(self, batch_size: int, lanes: int) -> int:
        """Return the number of generations that it wants live, and cached, at once."""
        ...

    def select(self, window: Sequence[Generation], batch_size: int) -> Selection:
        """Choose up to `batch_size` generations of the window, which is not empty and least recently served first.

        Choose none only when the policy waits for generations in flight.
        """
        ...
