"""Requests to a peer over streams that are kept: in Python a message on an open stream takes half the time of a call.

Owns the streams of one method. Each carries one request at a time, so there are as many as were ever asked at once. A
request that fails ends its stream, with the status that a call of its own would have had.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc


class Exchange:
    """For a method whose requests are safe to repeat and have a field `context`, a `RequestContext`."""

    def __init__(self, open_stream: Callable[[], Any]) -> None:
        """`open_stream` is a stub's method; it returns a `grpc.aio.StreamStreamCall`."""
        self._open_stream = open_stream
        self._kept: list[Any] = []

    async def ask(self, request: Any, timeout_s: float) -> Any:
        """Return the answer, None for one that cannot be parsed. Raises AioRpcError, all as a call would."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._ask(request, limit)
        except TimeoutError as error:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer came within {timeout_s:g} s") from error

    async def close(self) -> None:
        """Tell the peer that nothing more will be asked."""
        while stream := self._take():
            await half_close(stream)

    async def _ask(self, request: Any, limit: asyncio.Timeout) -> Any:
        while stream := self._take():
            try:
                return await self._ask_on(stream, request, limit)
            except _Gone:
                pass  # while nobody used it, its peer may have ended and another may be there
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
        self._kept.append(stream)
        return answer

    def _take(self) -> Any:
        """A stream that is kept and not over, as far as is known here; None without one."""
        while self._kept:
            stream = self._kept.pop()
            if not stream.done():
                return stream
        return None


async def _send(stream: Any, request: Any) -> None:
    """Raises _Gone, for a stream that took no request."""
    try:
        await stream.write(request)
    except asyncio.InvalidStateError as error:
        raise _Gone from error
    except grpc.aio.AioRpcError as error:
        # INTERNAL is the stub's own, in the place of what the peer may have said when it ended the stream.
        raise _Gone(None if error.code() is grpc.StatusCode.INTERNAL else error) from error


async def half_close(stream: Any) -> None:
    """Tell the peer that no more requests come on a stream."""
    with suppress(Exception):  # it may have ended meanwhile, which gRPC tells by errors of its own
        await stream.done_writing()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Gone(Exception):
    """The stream took no request, or its peer is not there: another may do."""

    def __init__(self, reason: grpc.aio.AioRpcError | None = None) -> None:
        self.reason = reason or _error(grpc.StatusCode.UNAVAILABLE, "the peer ended the stream without an answer")
