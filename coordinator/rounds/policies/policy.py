"""What a policy is asked and what it answers."""

from collections.abc import Sequence as Window
from dataclasses import dataclass
from typing import Protocol

from coordinator.requests.sequence import Sequence


@dataclass(frozen=True)
class Selection:
    sequences: list[Sequence]
    is_fallback: bool = False
    """The policy looked for a better group and found none."""


class Policy(Protocol):
    def live_limit(self, batch_size: int, lanes: int) -> int:
        """Sequences it wants live, and cached, at once."""
        ...

    def select(self, window: Window[Sequence], batch_size: int) -> Selection:
        """Choose 1 to `batch_size` sequences of a window that is not empty, least recently served first.

        May choose none when the sequences it waits for are in flight.
        """
        ...
