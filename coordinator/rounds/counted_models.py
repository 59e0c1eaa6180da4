"""Which draft models are counted by their names. A name is a series in whatever keeps the counts, so there are few.

A model has its place while it drafts, and a while longer. As long as all places are taken, others have none: nobody's
counts move to another name, where a rate would take them for tokens of now.
"""

import time
from collections.abc import Callable

from coordinator.rounds.sources import MOST_MODELS

REST_S = 3600.0
"""Seconds without a draft after which a model's place is another's: more than rates are taken over."""


class CountedModels:
    def __init__(self, forget: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`forget` is called with a model that loses its place."""
        self._forget = forget
        self._clock = clock
        self._drafted_s: dict[str, float] = {}
        """Time at which each drafted last, by model; those that did last at the end."""

    def counts(self, model: str) -> bool:
        """Note that a model drafted now. Return whether it is counted by its name; what has none is."""
        if not model:
            return True
        now_s = self._clock()
        if self._drafted_s.pop(model, None) is None and len(self._drafted_s) >= MOST_MODELS:
            oldest = next(iter(self._drafted_s))
            if now_s - self._drafted_s[oldest] < REST_S:
                return False
            del self._drafted_s[oldest]
            self._forget(oldest)
        self._drafted_s[model] = now_s
        return True
