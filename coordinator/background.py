"""Background tasks, which run beside the calls for as long as the coordinator runs."""

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
    """Keeps tasks until they end. A task that fails by a bug ends the process: a supervisor can start a new process,
    whereas requests would wait for ever for the work of the dead task."""

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
        """Cancel the running tasks and wait until they have ended."""
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
