"""The serving side of `Exchange`: requests of a stream are answered one after another.

Owns the streams' ends: whoever serves can end those that wait for a request, for their callers keep them open.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Around = Callable[[str, Any], AbstractContextManager[object]]


class Exchanges:
    def __init__(self, around: Around | None = None) -> None:
        """`around` makes, of a method's path and a request's context, what each request is answered within."""
        self._around = around
        self._waiting: set[asyncio.Task[Any]] = set()
        self._generation = 0
        self._is_closed = False

    @property
    def waiting_count(self) -> int:
        """Streams that have no request in work."""
        return len(self._waiting)

    async def answers(
        self, method: str, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        """Answer each request. `method` is its path."""
        generation = self._generation
        while (request := await self._next(requests, generation)) is not None:
            with self._within(method, request):
                response = await answer(request)
            yield response
            if self._is_closed:
                return

    def end_streams(self) -> None:
        """End the streams there are: those that have no request in work now, and the others after their answer."""
        self._generation += 1
        waiting, self._waiting = self._waiting, set()
        for task in waiting:
            task.cancel()

    def close(self) -> None:
        """End the streams there are, and let those that are yet to begin have one answer each."""
        self._is_closed = True
        self.end_streams()

    async def _next(self, requests: AsyncIterator[Any], generation: int) -> Any:
        """The next request; None when there is none, or the stream is to end."""
        if generation != self._generation:
            return None
        task = asyncio.current_task()
        assert task
        self._waiting.add(task)
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if generation == self._generation or task.uncancel():
                raise
            return None
        finally:
            self._waiting.discard(task)

    def _within(self, method: str, request: Any) -> AbstractContextManager[object]:
        return self._around(method, request.context) if self._around else nullcontext()
