"""How the next group is chosen from the window. A policy sees sequences and changes none."""

from collections.abc import Sequence as Window
from typing import Protocol

from coordinator.sequence import Sequence


class Policy(Protocol):
    def select(self, window: Window[Sequence], batch_size: int) -> list[Sequence]:
        """Choose 1 to `batch_size` sequences of a window that is not empty, least recently served first."""
        ...


class Continuous:
    """Any ready sequences, least recently served first. Ragged rows need no equal lengths, so nothing else matters."""

    def select(self, window: Window[Sequence], batch_size: int) -> list[Sequence]:
        return list(window[:batch_size])
