"""EQSPEC (arXiv 2510.22876, algorithm 1): a fixed batch, run until all of it is finished.

Run it with `--layout dense` to pay for realignment as published. As in the reference code, the slots of finished rows
stay empty. Unlike there, finished rows leave the rounds, and full acceptance yields the bonus token.
"""

from collections.abc import Sequence

from coordinator.requests.generation import Generation
from coordinator.rounds.policies.policy import Selection


class EqSpec:
    def __init__(self) -> None:
        self._batch: set[Generation] = set()

    def live_limit(self, batch_size: int, lanes: int) -> int:
        return batch_size

    def select(self, window: Sequence[Generation], batch_size: int) -> Selection:
        ready = [generation for generation in window if generation in self._batch]
        if not ready:
            ready = sorted(window, key=lambda generation: generation.arrival)[:batch_size]
            self._batch = set(ready)
        return Selection(ready)
