"""A client's retries after failures. Owns the pauses and the length of an outage; knows nothing of calls or answers."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.errors import CallTimedOut, Overloaded, PacelineError, PeerUnavailable

MAX_DOUBLINGS = 32
"""Doublings beyond any longest pause. Floats would overflow after about a thousand."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class RetryPolicy:
    """The length of an outage and the pauses in it. A retry is safe: it begins anew or resumes from received tokens."""

    retry_for_s: float = 120.0
    """Seconds that an outage may last from its first failure; 0 for no retries. Received tokens end an outage. So does
    a coordinator that reports being full, which is asked again for as long as that lasts."""
    first_delay_s: float = 0.2
    """Longest pause after the first failure; it doubles with each further one."""
    max_delay_s: float = 3.0
    """Longest pause after any number of failures."""
    wait_while_full: bool = True
    """Whether a request without output waits while coordinators are full; false: it fails when all of them are."""

    def delay_s(self, failures: int) -> float:
        """Draw the pause in seconds after so many failures in a row, from 0 to a maximum that doubles each time.

        The whole pause is random, so that the clients of a failed coordinator do not return all at once.
        """
        longest_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return random.uniform(0.0, longest_s)


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(retry_for_s=0.0)


@dataclass(frozen=True)
class Retry:
    """A failed call that will be made again, at the same or the next address."""

    address: str
    """Address of the failed call."""
    error: PacelineError
    delay_s: float
    """Seconds until the next call."""
    remaining_s: float | None
    """Seconds until the failure is raised if all calls fail; None when the coordinator is only full."""


OnRetry = Callable[[Retry], None]


class Outage:
    """Failures in a row, with nothing received between them, of the calls for one request."""

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        ends_at_s: float | None,
        clock: Callable[[], float],
        sleep: Sleep,
        on_retry: OnRetry | None,
    ) -> None:
        """`ends_at_s` is the deadline of the request on the clock; None for no deadline."""
        self._policy = policy
        self._ends_at_s = ends_at_s
        self._clock = clock
        self._sleep = sleep
        self._on_retry = on_retry
        self._failures = 0
        self._began_s: float | None = None

    def over(self) -> None:
        """End the outage because something was received."""
        self._failures, self._began_s = 0, None

    async def wait(self, error: PacelineError, address: str) -> None:
        """Wait before the next call. Raise when there is to be none."""
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
            # The last call is made exactly when the time is up.
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
