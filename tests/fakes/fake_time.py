"""Time that passes only when every task waits for it."""

import asyncio
import heapq
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")

TURNS = 50
"""Turns of the loop after which all runnable tasks have run."""


class FakeTime:
    """A clock and its sleep; `run` advances to the next sleeper's time when nothing else can run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._order), woken))
        await woken

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end."""
        task = asyncio.ensure_future(work)
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if task.done():
                return await task
            self.now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
