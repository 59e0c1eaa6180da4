"""How long calls keep away: after a pause much longer than those of late, nobody seems to come for what is prepared.

A coordinator that stops asking says nothing. Without an end a service would go on for seconds, on cores that the target
may want. Knows nothing of what is prepared.
"""

import time
from collections.abc import Callable

PATIENCE = 3.0
"""Usual pauses that are waited for."""
MEMORY = 0.9
"""Weight of the longest pause after one more call."""


class Pauses:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._answered_s: float | None = None
        self._longest_s: float | None = None
        """The longest pause of late; None while there was none."""

    def asked(self) -> None:
        """Note that a call comes."""
        if self._answered_s is None:
            return
        pause_s = self._clock() - self._answered_s
        if self._longest_s is None:
            self._longest_s = pause_s
        else:
            # A longer one was no pause, but an end.
            self._longest_s = max(MEMORY * self._longest_s, min(pause_s, PATIENCE * self._longest_s))

    def answered(self) -> None:
        """Note that a call was answered."""
        self._answered_s = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether calls stay away for longer than they did of late."""
        if self._answered_s is None or self._longest_s is None:
            return False
        return self._clock() - self._answered_s > PATIENCE * self._longest_s
