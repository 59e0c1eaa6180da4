"""Tasks that run side by side, of which the first failure ends all, and tasks that outlast who began them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


@asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a TaskGroup whose first failure is raised as it is, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__


async def results_of(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return what the calls return, made at once. A task of its own would cost a single call more than all else."""
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


def kept_task(work: Coroutine[Any, Any, Result], tasks: set[asyncio.Task[Result]]) -> asyncio.Task[Result]:
    """Begin work in a task of its own, which `tasks` holds until it has ended: the event loop alone would lose it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def outlasting(work: Coroutine[Any, Any, Result], tasks: set[asyncio.Task[Result]]) -> Result:
    """Wait for work that goes on where its caller is cancelled, in a task that `tasks` holds.

    How it ends then concerns nobody: asyncio would log a failure that nobody looked at, with its traceback.
    """
    task = kept_task(work, tasks)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return await asyncio.shield(task)
