"""Waiting for what nothing tells a test of."""

import asyncio
from collections.abc import Callable

LIMIT_S = 60.0
"""Seconds after which it will not come: a test that waits for longer would end in the limit of all tests, or never."""


async def until(condition: Callable[[], object], pause_s: float = 0.01) -> None:
    """Wait until the condition holds, and look after each pause. Raise TimeoutError if it does not hold in time."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(pause_s)
