"""How many requests for outputs are in work, and whether more are taken."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Running:
    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False

    @property
    def is_idle(self) -> bool:
        return not self._count

    @property
    def is_full(self) -> bool:
        return self._count >= self._most

    @contextmanager
    def one(self) -> Iterator[None]:
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self.is_idle:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Take no more, and wait until those in work have ended or the time is up."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return
