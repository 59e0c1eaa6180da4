"""A circuit breaker: it decides whether a service that failed is called again.

Owns the decision only; the caller reports the outcome of each call. Failures open the circuit, and while it is open
nothing is called. After a pause, which doubles with every failed trial, it lets one call at a time through. A success
closes it.

Failures count in a row, because an error may be the fault of a single request. A wrong answer, one that cannot be
parsed or cannot be true, is nobody else's fault. So it counts for longer: only many right ones make up for it. A
circuit that opens for wrong answers, or again for a call without an answer, stays open for longer each time.
"""

from collections.abc import Callable
from enum import Enum, auto

from paceline.errors import PacelineError, WrongAnswer
from paceline.types import CircuitState

FAILURES_TO_OPEN = 2
"""Failures in a row: a single one may be a broken connection, which the next call mends."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SUCCESSES_TO_FORGET = 20
"""Successes in a row after which the next pause is short again."""
WELL_TO_FORGET_S = 60.0
"""Least seconds from the end of a pause to then: where a network loses large messages alone, many small calls succeed
before the next one hangs."""
RIGHT_FOR_A_WRONG = 10
"""Right answers that make up for a wrong one: a service that answers more than one call in eleven wrongly is called no
more, in whatever order they come."""


class Failure(Enum):
    """How a call failed."""

    ERROR = auto()
    LATE = auto()
    """Its answer came, and too late again and again to be of use. Opens the circuit at once."""
    HUNG = auto()
    """No answer came. Opens the circuit at once."""
    WRONG = auto()
    """Its answer cannot be parsed, or cannot be true."""

    @classmethod
    def of(cls, error: PacelineError) -> "Failure":
        return cls.WRONG if isinstance(error, WrongAnswer) else cls.ERROR


class Circuit:
    def __init__(
        self,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
    ) -> None:
        """`jitter` gives numbers from 0 to 1; `failures_to_open` in a row, or wrong answers, open the circuit."""
        self._failures_to_open = failures_to_open
        self._clock = clock
        self._jitter = jitter
        self._state = CircuitState.CLOSED
        self._failures = 0
        self._wrong = 0.0
        """Wrong answers that right ones have not made up for."""
        self._successes = 0
        self._pause_s = FIRST_PAUSE_S
        self._tries_again_at = 0.0
        self._forgets_at = 0.0

    @property
    def state(self) -> CircuitState:
        return self._state

    @property
    def would_allow(self) -> bool:
        """The answer that `allows` would give now, without claiming the trial."""
        return self._state is CircuitState.CLOSED or (
            self._state is CircuitState.OPEN and self._clock() >= self._tries_again_at
        )

    def allows(self) -> bool:
        """Return whether to call now. A caller that does must report the outcome."""
        allowed = self.would_allow
        if allowed and self._state is CircuitState.OPEN:
            self._state = CircuitState.HALF_OPEN
        return allowed

    def succeeded(self) -> None:
        if self._state is CircuitState.OPEN:
            return  # as in `failed`
        self._failures = 0
        self._wrong = max(0.0, self._wrong - 1 / RIGHT_FOR_A_WRONG)
        self._successes += 1
        self._state = CircuitState.CLOSED
        if self._successes >= SUCCESSES_TO_FORGET and self._clock() >= self._forgets_at:
            self._pause_s = FIRST_PAUSE_S

    def failed(self, failure: Failure = Failure.ERROR) -> None:
        if self._state is CircuitState.OPEN:
            return  # the call was under way when the circuit opened: it says nothing new
        self._failures += 1
        self._successes = 0
        if failure is Failure.WRONG:
            self._wrong = min(self._wrong + 1, self._failures_to_open)
        is_too_wrong = failure is Failure.WRONG and self._wrong >= self._failures_to_open
        is_back_in_vain = failure is Failure.HUNG and self._clock() < self._forgets_at
        if self._state is CircuitState.HALF_OPEN or is_too_wrong or is_back_in_vain:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._open()
        elif failure in (Failure.LATE, Failure.HUNG) or self._failures >= self._failures_to_open:
            self._open()

    def gave_up(self) -> None:
        """Note a call that was abandoned for a reason that says nothing about the service."""
        if self._state is CircuitState.HALF_OPEN:
            self._state = CircuitState.OPEN

    def _open(self) -> None:
        self._state = CircuitState.OPEN
        # Up to half of the pause is random, so that coordinators do not come back to a service all at once.
        self._tries_again_at = self._clock() + self._pause_s * (1 + self._jitter()) / 2
        self._forgets_at = self._tries_again_at + WELL_TO_FORGET_S
