"""Requests to a peer over streams that stay open. In Python a message on an open stream takes half the time of a call.

Owns the streams of one method. Each stream carries one request at a time; an unused stream is ended after a while. A
request that fails ends its stream with the status that a separate call would have had.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

UNUSED_S = 30.0
"""Seconds after which a stream without requests is ended."""


class Exchange:
    """Streams of one method. Its requests must be safe to repeat and have a field `context`, a `RequestContext`."""

    def __init__(self, open_stream: Callable[[], Any]) -> None:
        """`open_stream` is a stub's method that returns a `grpc.aio.StreamStreamCall`."""
        self._open_stream = open_stream
        self._kept: list[tuple[float, Any]] = []
        """Idle streams with the times of their last answers, oldest first. The newest is used first."""
        self._trimming: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def ask(self, request: Any, timeout_s: float) -> Any:
        """Return the answer, or None when it cannot be parsed. Raise AioRpcError as a call would."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._ask(request, limit)
        except TimeoutError as error:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer came within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Tell the peer that nothing more will be asked."""
        if self._trimming:
            self._trimming.cancel()
        while stream := self._take():
            await half_close(stream)

    async def _ask(self, request: Any, limit: asyncio.Timeout) -> Any:
        while stream := self._take():
            try:
                return await self._ask_on(stream, request, limit)
            except _Gone:
                pass  # the peer may have been replaced while the stream was idle
        try:
            return await self._ask_on(self._open_stream(), request, limit)
        except _Gone as gone:
            raise gone.reason from None

    async def _ask_on(self, stream: Any, request: Any, limit: asyncio.Timeout) -> Any:
        request.context.timeout_s = max(0.0, (limit.when() or 0.0) - asyncio.get_running_loop().time())
        try:
            await _send(stream, request)
            answer = await stream.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise _Gone(error) from error
            raise
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if answer is grpc.aio.EOF:
            raise _Gone
        self._keep(stream)
        return answer

    def _keep(self, stream: Any) -> None:
        loop = asyncio.get_running_loop()
        self._kept.append((loop.time(), stream))
        if self._trimming is None:
            self._trimming = loop.call_later(UNUSED_S, self._end_unused)

    def _end_unused(self) -> None:
        loop = asyncio.get_running_loop()
        while self._kept and self._kept[0][0] + UNUSED_S <= loop.time():
            _, stream = self._kept.pop(0)
            ending = asyncio.create_task(half_close(stream))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        next_s = self._kept[0][0] + UNUSED_S if self._kept else None
        self._trimming = None if next_s is None else loop.call_at(next_s, self._end_unused)

    def _take(self) -> Any:
        """Return the newest idle stream that is not known to have ended; None without one."""
        while self._kept:
            _, stream = self._kept.pop()
            if not stream.done():
                return stream
        return None


async def _send(stream: Any, request: Any) -> None:
    """Send a request. Raise _Gone when the stream did not take it."""
    try:
        await stream.write(request)
    except asyncio.InvalidStateError as error:
        raise _Gone from error
    except grpc.aio.AioRpcError as error:
        # INTERNAL comes from the stub itself and hides any status that the peer ended the stream with.
        raise _Gone(None if error.code() is grpc.StatusCode.INTERNAL else error) from error


async def half_close(stream: Any) -> None:
    """Tell the peer that no more requests will come on a stream."""
    with suppress(Exception):  # gRPC raises various errors when the stream has already ended
        await stream.done_writing()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Gone(Exception):
    """The stream took no request, or its peer is unavailable. Another stream may work."""

    def __init__(self, reason: grpc.aio.AioRpcError | None = None) -> None:
        self.reason = reason or _error(grpc.StatusCode.UNAVAILABLE, "the peer ended the stream without an answer")
