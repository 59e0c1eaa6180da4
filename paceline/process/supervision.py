"""Supervision of services that end unexpectedly.

Owns the times and number of restarts and the messages about them. `service_process` starts them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import NoReturn, Protocol

from paceline.errors import PeerFailed, StartupError

Tell = Callable[[str], None]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds of pause before the second restart in a row, and at most; the first restart is immediate."""
MOST_DOUBLINGS = 6
"""After so many a pause is the longest."""
STEADY_S = 60.0
"""Seconds that a service must run before its end counts as the first in a row again."""
MOST_STARTS = 5
"""Restarts in a row; supervision gives up when the last of them fails and nobody serves in the service's place."""


class Service(Protocol):
    """A service that can end and be restarted at its address."""

    @property
    def name(self) -> str: ...

    async def start(self) -> object:
        """Return when it listens. Raise StartupError when it ends first."""
        ...

    async def ended(self) -> str:
        """Wait until it has ended; return how, such as `ended by signal 9`."""
        ...


async def fail_at_end(service: Service) -> NoReturn:
    """Raise PeerFailed when the service ends, because a measurement across a restart would be invalid."""
    raise PeerFailed(
        f"{service.name} {await service.ended()} while it was in use; see above, and run the command again"
    )


async def keep_running(
    service: Service,
    tell: Tell,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    *,
    others_serve: Callable[[], bool] = lambda: False,
) -> NoReturn:
    """Restart the service whenever it ends, after pauses that double.

    Raise StartupError when that is of no use, unless `others_serve` in its place: to end would end them too.
    """
    starts_in_a_row = 0
    listening_since: float | None = clock()
    for number in count(1):
        how = await service.ended()
        if listening_since is None and starts_in_a_row >= MOST_STARTS:
            how += f": {starts_in_a_row} starts in a row were of no use"
            if not others_serve():
                raise StartupError(f"{service.name} {how}; see above")
            how += ", and the others serve without it"
        if listening_since is not None and clock() - listening_since >= STEADY_S:
            starts_in_a_row = 0
        pause_s = _pause_s(starts_in_a_row)
        starts_in_a_row += 1
        when = f" in {pause_s:g} s" if pause_s else ""
        tell(f"{service.name} {how}; starting it again{when} ({_ordinal(number)} time)")
        await sleep(pause_s)
        try:
            await service.start()
        except StartupError as error:
            listening_since = None
            if error.__cause__:  # else the service's own message is on stderr
                tell(error.message)
        else:
            listening_since = clock()
            tell(f"{service.name} is back")
    raise AssertionError("a count never ends")


def _pause_s(starts_in_a_row: int) -> float:
    doublings = min(starts_in_a_row - 1, MOST_DOUBLINGS)  # the power would be too large for a float some day
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**doublings) if starts_in_a_row else 0.0


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
