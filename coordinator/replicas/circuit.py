"""Whether a service that failed is to be called: a circuit that opens by failures and closes by successes.

Owns the decision only; who calls tells it what came of each call. While open, calls are not worth their wait; after a
pause that doubles with every failed trial, one call at a time is let through to see.
"""

import random
import time
from collections.abc import Callable

from paceline.types import CircuitState

FAILURES_TO_OPEN = 2
"""In a row: a single one may be a broken connection, which the next call mends."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SUCCESSES_TO_FORGET = 20
"""After so many in a row the next pause is short again."""


class Circuit:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
    ) -> None:
        """`jitter` gives numbers from 0 to 1; `failures_to_open` is how many in a row open it."""
        self._failures_to_open = failures_to_open
        self._clock = clock
        self._jitter = jitter
        self._state = CircuitState.CLOSED
        self._failures = 0
        self._successes = 0
        self._pause_s = FIRST_PAUSE_S
        self._tries_again_at = 0.0

    @property
    def state(self) -> CircuitState:
        return self._state

    @property
    def would_allow(self) -> bool:
        """What `allows` would answer now, asked without a call in mind."""
        return self._state is CircuitState.CLOSED or (
            self._state is CircuitState.OPEN and self._clock() >= self._tries_again_at
        )

    def allows(self) -> bool:
        """Whether to call now. The caller must then tell what came of it."""
        allowed = self.would_allow
        if allowed and self._state is CircuitState.OPEN:
            self._state = CircuitState.HALF_OPEN
        return allowed

    def succeeded(self) -> None:
        self._state = CircuitState.CLOSED
        self._failures = 0
        self._successes += 1
        if self._successes >= SUCCESSES_TO_FORGET:
            self._pause_s = FIRST_PAUSE_S

    def failed(self, *, is_certain: bool = False) -> None:
        """`is_certain` when there is no need to see it twice."""
        if self._state is CircuitState.OPEN:
            return  # a call that was under way when it opened: it says nothing new
        self._failures += 1
        self._successes = 0
        if self._state is CircuitState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._open()
        elif is_certain or self._failures >= self._failures_to_open:
            self._open()

    def gave_up(self) -> None:
        """The call was abandoned for a reason that says nothing of the service."""
        if self._state is CircuitState.HALF_OPEN:
            self._state = CircuitState.OPEN

    def _open(self) -> None:
        self._state = CircuitState.OPEN
        # Half of the pause is chance, so that coordinators do not come back to a service as one.
        self._tries_again_at = self._clock() + self._pause_s * (1 + self._jitter()) / 2
