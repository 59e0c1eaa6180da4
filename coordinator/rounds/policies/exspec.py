"""EXSPEC (arXiv 2510.22876, algorithm 2): groups of equal length from a sliding window, which need no realignment.

Differs where the published one starves: a group may be partial, and a sequence that has waited for long is served next
whatever its length. Lengths are the sequences' own, without the padding that the reference code counts.
"""

from collections import defaultdict
from collections.abc import Sequence as Window

from coordinator.requests.sequence import Sequence
from coordinator.rounds.policies.policy import Selection

PARTIAL_SHARE = 0.5
"""A group of equals runs when it fills this much of the batch."""
PATIENCE = 2
"""A sequence waits at most so many times the rounds that serving the whole window once takes."""


class ExSpec:
    def __init__(self, window: int) -> None:
        self._window = window
        self._round = 0
        self._served: dict[Sequence, int] = {}

    def live_limit(self, batch_size: int, lanes: int) -> int:
        return max(self._window, batch_size)

    def select(self, window: Window[Sequence], batch_size: int) -> Selection:
        self._round += 1
        self._served = {sequence: self._served.get(sequence, self._round) for sequence in window}
        selection = self._choose(window, batch_size)
        for sequence in selection.sequences:
            self._served[sequence] = self._round
        return selection

    def _choose(self, window: Window[Sequence], batch_size: int) -> Selection:
        by_length: defaultdict[int, list[Sequence]] = defaultdict(list)
        for sequence in window:
            by_length[len(sequence.token_ids)].append(sequence)
        oldest = min(window, key=lambda sequence: self._served[sequence])
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

    def _fallback(self, window: Window[Sequence], batch_size: int) -> Selection:
        longest_waiting = sorted(window, key=lambda sequence: self._served[sequence])
        return Selection(longest_waiting[:batch_size], is_fallback=True)
