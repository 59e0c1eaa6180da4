"""EQSPEC (arXiv 2510.22876, algorithm 1): a fixed batch, run until all of it is finished.

Run it with `--layout dense` to pay for realignment as published. Unlike the reference code it lets finished rows leave
the rounds, and full acceptance yields the bonus token; the slots of finished rows stay empty, as there.
"""

from collections.abc import Sequence as Window

from coordinator.requests.sequence import Sequence
from coordinator.rounds.policies.policy import Selection


class EqSpec:
    def __init__(self) -> None:
        self._batch: set[Sequence] = set()

    def live_limit(self, batch_size: int, lanes: int) -> int:
        return batch_size

    def select(self, window: Window[Sequence], batch_size: int) -> Selection:
        ready = [sequence for sequence in window if sequence in self._batch]
        if not ready:
            ready = sorted(window, key=lambda sequence: sequence.arrival)[:batch_size]
            self._batch = set(ready)
        return Selection(ready)
