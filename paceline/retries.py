"""When a client calls again after a failure, and when it gives up.

Owns the pauses and the length of an outage. Knows nothing of calls or of what they bring.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.errors import CallTimedOut, Overloaded, PacelineError, PeerUnavailable

MAX_DOUBLINGS = 32
"""Beyond any longest pause; floats end after about a thousand."""

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class RetryPolicy:
    """When to call again: only where that is safe, which is before anything was received or with what was."""

    retry_for_s: float = 120.0
    """Seconds that an outage may last, from its first failure; 0: no call is made again. Tokens end an outage, and so
    does a coordinator that says that it is full: that one is asked again for as long as it is."""
    first_delay_s: float = 0.2
    max_delay_s: float = 3.0

    def delay_s(self, failures: int) -> float:
        """Draw a pause after so many failures in a row, between none and a longest that doubles each time.

        All of it is chance, so that the clients of a coordinator that failed do not come back together.
        """
        longest_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return random.uniform(0.0, longest_s)


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(retry_for_s=0.0)


@dataclass(frozen=True)
class Retry:
    """A call failed and is made again, there or at the next address."""

    address: str
    """Whose call failed."""
    error: PacelineError
    delay_s: float
    """Until the next call."""
    remaining_s: float | None
    """Until the failure is raised, if all calls go on to fail; None: it is not, for the coordinator is only full."""


OnRetry = Callable[[Retry], None]


class Outage:
    """Failures with nothing received between them, of calls that are one to whoever waits for them."""

    def __init__(
        self, policy: RetryPolicy, *, ends_at_s: float | None, clock: Clock, sleep: Sleep, on_retry: OnRetry | None
    ) -> None:
        """`ends_at_s` is when all must be over, by the clock; None: there is no such time."""
        self._policy = policy
        self._ends_at_s = ends_at_s
        self._clock = clock
        self._sleep = sleep
        self._on_retry = on_retry
        self._failures = 0
        self._began_s: float | None = None

    def over(self) -> None:
        """Something was received: the next failure is a first one."""
        self._failures, self._began_s = 0, None

    async def wait(self, error: PacelineError, address: str) -> None:
        """Wait before the next call; raise instead when there should be none."""
        if not self._policy.retry_for_s:
            raise error
        now_s = self._clock()
        self._failures += 1
        delay_s, remaining_s = self._policy.delay_s(self._failures), self._remaining_s(error, now_s)
        if isinstance(error, Overloaded):
            delay_s += error.retry_after_s
        if remaining_s is not None:
            if remaining_s <= 0:
                raise PeerUnavailable(
                    f"{address} could not be used for {self._policy.retry_for_s:g} s: {error.message}", error.metadata
                ) from error
            # The last call is made when the time is up, not before.
            delay_s = min(delay_s, remaining_s)
        if self._ends_at_s is not None and now_s + delay_s >= self._ends_at_s:
            raise CallTimedOut(f"the output did not end in time; the last call failed: {error.message}") from error
        if self._on_retry:
            self._on_retry(Retry(address, error, delay_s, remaining_s))
        await self._sleep(delay_s)

    def _remaining_s(self, error: PacelineError, now_s: float) -> float | None:
        if isinstance(error, Overloaded):
            self._began_s = None
            return None
        if self._began_s is None:
            self._began_s = now_s
        return self._began_s + self._policy.retry_for_s - now_s
