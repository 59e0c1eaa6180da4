"""The signals to a troubled target, and their effects. This module knows nothing of models."""

import asyncio
import signal

from paceline.errors import PeerFailed

ERRORS = signal.SIGUSR1
"""Signal that makes every verify call fail, until it is sent again."""
HANG = signal.SIGUSR2
"""Signal that makes every verify call hang, until it is sent again."""
LOOK_EVERY_S = 0.02


class Trouble:
    """The trouble that the service has now."""

    def __init__(self) -> None:
        self._now: set[int] = set()

    def toggle(self, number: int, frame: object) -> None:
        self._now ^= {number}

    async def strike(self) -> None:
        """Raise PeerFailed if calls must fail; else wait while they must hang."""
        if ERRORS in self._now:
            raise PeerFailed("the soak told this target to fail")
        while HANG in self._now:  # noqa: ASYNC110  (a signal sets no event of the loop)
            await asyncio.sleep(LOOK_EVERY_S)
