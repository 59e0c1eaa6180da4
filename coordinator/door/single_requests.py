"""Calls with one request, which is kept no longer than its handler likes.

gRPC holds the one message of a call in frames of its own until the call has ended: 8 MiB of each call that waits in the
queue. It holds no message of a stream, so such a call is served as a stream of which one message is read.
"""

import asyncio
from typing import Any

import grpc

from paceline.security.access import Context
from paceline.wire import WrappingInterceptor


class SingleRequests(WrappingInterceptor):
    """Lets a handler read its request by itself, with `single_request`. To be outermost: others see one request."""

    def __init__(self, method: str) -> None:
        """`method` is the path of a method with one request and a stream of answers."""
        self._method = method

    def concerns(self, method: str) -> bool:
        return method == self._method

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        return handler._replace(request_streaming=True, unary_stream=None, stream_stream=handler.unary_stream)


async def single_request(context: Context) -> bytes:
    """Return the request of a call. Raise CancelledError where none comes, as gRPC's own reading ends the handler.

    It may have been cancelled, or too large for gRPC, which then has ended the call: no status can be sent.
    """
    async for message in Messages(context):
        return message
    raise asyncio.CancelledError


class Messages:
    """The messages of a stream, each of which is kept by its reader alone."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __aiter__(self) -> "Messages":
        return self

    async def __anext__(self) -> bytes:
        message = await self._context.read()
        if not isinstance(message, bytes):
            raise StopAsyncIteration
        return message
