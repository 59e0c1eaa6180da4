"""Placeholder until the sources come."""

from collections.abc import Sequence

from coordinator.requests.guess import Guess
from paceline.types import DraftSource


class Calibration:
    def __init__(self, source: DraftSource) -> None:
        self._right, self._asked = 1.0, 2.0

    def chances(self, guess: Guess, likelier: float = 1.0) -> list[float]:
        rate = self._right / self._asked
        return [rate ** (place + 1) for place in range(len(guess.token_ids))]

    def observe(self, guess: Guess, committed: Sequence[int]) -> None:
        for own, real in zip(guess.token_ids, committed):
            self._asked += 1
            if own != real:
                return
            self._right += 1
