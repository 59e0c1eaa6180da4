"""The serving side of `Exchange`: the requests of a stream are answered one after another.

Owns the end of the streams. Callers keep idle streams open, so the server must be able to end them. Between answers a
stream carries what is sent unasked.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

Around = Callable[[str, Any], AbstractContextManager[object]]


class Exchanges:
    def __init__(self, around: Around | None = None) -> None:
        """`around` takes a method's path and a request's context; each request is answered within its result."""
        self._around = around
        self._waiting: set[asyncio.Task[Any]] = set()
        self._epoch = 0
        self._is_closed = False

    @property
    def waiting_count(self) -> int:
        """The number of streams without a request in progress."""
        return len(self._waiting)

    async def answers(
        self,
        method: str,
        requests: AsyncIterator[Any],
        answer: Callable[[Any], Awaitable[Any]],
        unasked: asyncio.Queue[Any] | None = None,
    ) -> AsyncIterator[Any]:
        """Answer each request of a stream, and send what is put into `unasked`. `method` is the path of the method."""
        if unasked is None:
            async for response in self._answers(method, requests, answer):
                yield response
            return
        # Closed here: what waits for a request or a message would outlast a stream that failed.
        async with aclosing(_merged(requests, unasked)) as merged:
            async for response in self._answers(method, merged, answer):
                yield response

    async def _answers(
        self, method: str, incoming: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        epoch = self._epoch
        while (request := await self._next(incoming, epoch)) is not None:
            if isinstance(request, _Unasked):
                yield request.response
                continue
            with self._within(method, request):
                response = await answer(request)
            yield response
            if self._is_closed:
                return

    def end_streams(self) -> None:
        """End all open streams: idle ones now, the others after their current answer."""
        self._epoch += 1
        waiting, self._waiting = self._waiting, set()
        for task in waiting:
            task.cancel()

    def close(self) -> None:
        """End all open streams. Streams that begin later get one answer each."""
        self._is_closed = True
        self.end_streams()

    async def _next(self, requests: AsyncIterator[Any], epoch: int) -> Any:
        """Return the next request; None when there is none or the stream must end."""
        if epoch != self._epoch:
            return None
        task = asyncio.current_task()
        assert task
        self._waiting.add(task)
        try:
            return await anext(requests, None)
        except asyncio.CancelledError:
            if epoch == self._epoch or task.uncancel():
                raise
            return None
        finally:
            self._waiting.discard(task)

    def _within(self, method: str, request: Any) -> AbstractContextManager[object]:
        return self._around(method, request.context) if self._around else nullcontext()


@dataclass(frozen=True, slots=True)
class _Unasked:
    response: Any


async def _merged(requests: AsyncIterator[Any], unasked: asyncio.Queue[Any]) -> AsyncGenerator[Any, None]:
    """Yield the requests, and between them what is to be sent unasked."""

    async def next_request() -> Any:
        return await anext(requests, None)

    reading, taking = asyncio.ensure_future(next_request()), asyncio.ensure_future(unasked.get())
    try:
        while True:
            await asyncio.wait((reading, taking), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                if (request := reading.result()) is None:
                    return
                yield request
                reading = asyncio.ensure_future(next_request())
            if taking.done():
                yield _Unasked(taking.result())
                taking = asyncio.ensure_future(unasked.get())
    finally:
        reading.cancel()
        taking.cancel()
        await asyncio.wait((reading, taking))
