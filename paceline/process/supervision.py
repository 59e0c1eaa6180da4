"""What is done when a service ends that nobody asked to end.

Owns when it is started again, how often, and what is said of it. How a process starts is the launcher's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import NoReturn, Protocol

from paceline.errors import PeerFailed, StartupError

Tell = Callable[[str], None]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before the second start in a row, and before any of them; the first is at once."""
STEADY_S = 60.0
"""A service that ran for so long ends for a new reason: the starts in a row begin anew."""
MOST_STARTS = 5
"""In a row; when the last of them fails too, the next would."""


class Service(Protocol):
    """What can end, and be started again where it was."""

    @property
    def name(self) -> str: ...

    async def start(self) -> object:
        """Return when it listens. Raises StartupError when it ends first."""
        ...

    async def ended(self) -> str:
        """Wait until it has ended, and say how: `ended by signal 9`."""
        ...


async def fail_at_end(service: Service) -> NoReturn:
    """Raise PeerFailed when the service ends: what is measured across a restart is no measurement."""
    raise PeerFailed(
        f"{service.name} {await service.ended()} while it was in use; see above, and run the command again"
    )


async def keep_running(
    service: Service,
    tell: Tell,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Start the service again whenever it ends, after pauses that double. Raises StartupError when that is no use."""
    starts_in_a_row = 0
    listening_since: float | None = clock()
    for number in count(1):
        how = await service.ended()
        if listening_since is None and starts_in_a_row >= MOST_STARTS:
            raise StartupError(f"{service.name} {how}: {starts_in_a_row} starts in a row were of no use; see above")
        if listening_since is not None and clock() - listening_since >= STEADY_S:
            starts_in_a_row = 0
        pause_s = _pause_s(starts_in_a_row)
        starts_in_a_row += 1
        when = f" in {pause_s:g} s" if pause_s else ""
        tell(f"{service.name} {how}; starting it again{when} ({_ordinal(number)} time)")
        await sleep(pause_s)
        try:
            await service.start()
        except StartupError:
            listening_since = None  # why is on stderr, in its own words
        else:
            listening_since = clock()
            tell(f"{service.name} is back")
    raise AssertionError("a count never ends")


def _pause_s(starts_in_a_row: int) -> float:
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (starts_in_a_row - 1)) if starts_in_a_row else 0.0


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
