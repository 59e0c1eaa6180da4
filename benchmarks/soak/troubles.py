"""What a troubled target is told by which signal, and what it does then. Knows nothing of models."""

import asyncio
import signal

from paceline.errors import PeerFailed

ERRORS = signal.SIGUSR1
"""Every verify call fails from then on, or is answered again."""
HANG = signal.SIGUSR2
"""Verify calls hang, or go on."""
LOOK_EVERY_S = 0.02


class Trouble:
    """What is wrong with the service now."""

    def __init__(self) -> None:
        self._now: set[int] = set()

    def toggle(self, number: int, frame: object) -> None:
        self._now ^= {number}

    async def strike(self) -> None:
        """Raise PeerFailed, or wait until it is over, if there is trouble."""
        if ERRORS in self._now:
            raise PeerFailed("the soak told this target to fail")
        while HANG in self._now:  # noqa: ASYNC110  (a signal sets no event of the loop)
            await asyncio.sleep(LOOK_EVERY_S)
