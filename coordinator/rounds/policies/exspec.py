"""EXSPEC (arXiv 2510.22876, algorithm 2): groups of equal length from a sliding window, which need no realignment.

Differs from the paper where its algorithm starves generations: a group may be partial, and a generation that has waited
long is served next, whatever its length. Lengths do not include the padding that the reference code counts.
"""

from collections import defaultdict
from collections.abc import Sequence

from coordinator.requests.generation import Generation
from coordinator.rounds.policies.policy import Selection

PARTIAL_SHARE = 0.5
"""A group of equal length runs when it fills this share of the batch."""
PATIENCE = 2
"""Most rounds a generation waits, as a multiple of the rounds that serve the whole window once."""


class ExSpec:
    def __init__(self, window: int) -> None:
        self._window = window
        self._round = 0
        self._served: dict[Generation, int] = {}

    def live_limit(self, batch_size: int, lanes: int) -> int:
        return max(self._window, batch_size)

    def select(self, window: Sequence[Generation], batch_size: int) -> Selection:
        self._round += 1
        self._served = {generation: self._served.get(generation, self._round) for generation in window}
        selection = self._choose(window, batch_size)
        for generation in selection.generations:
            self._served[generation] = self._round
        return selection

    def _choose(self, window: Sequence[Generation], batch_size: int) -> Selection:
        by_length: defaultdict[int, list[Generation]] = defaultdict(list)
        for generation in window:
            by_length[len(generation.token_ids)].append(generation)
        oldest = min(window, key=lambda generation: self._served[generation])
        limit = PATIENCE * -(-len(window) // batch_size)
        if self._round - self._served[oldest] >= limit:
            group = by_length[len(oldest.token_ids)]
            if len(group) < PARTIAL_SHARE * batch_size:
                return self._fallback(window, batch_size)
        else:
            group = max(by_length.values(), key=len)
        enough = min(batch_size, len(window)) * PARTIAL_SHARE
        if len(group) >= max(2, enough):
            return Selection(group[:batch_size])
        return self._fallback(window, batch_size)

    def _fallback(self, window: Sequence[Generation], batch_size: int) -> Selection:
        longest_waiting = sorted(window, key=lambda generation: self._served[generation])
        return Selection(longest_waiting[:batch_size], is_fallback=True)
