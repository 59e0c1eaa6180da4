"""Tasks that run beside the calls for as long as the coordinator does."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

log = structlog.get_logger()

Result = TypeVar("Result")


class Background:
    """Keeps tasks until they end. One that fails by a bug ends the process: whoever runs it can start a new one, while
    requests would wait for ever for what the task did."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.critical("a background task failed; stopping", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    async def stop(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def background() -> AsyncIterator[Background]:
    tasks = Background()
    try:
        yield tasks
    finally:
        await tasks.stop()
