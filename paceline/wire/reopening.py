"""A channel that reopens when its opening value changes, such as rotated certificates.

New calls use the new channel. Calls in flight end on the old one, which closes after the last of them. Request streams
could stay open for ever, so they are half-closed.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import WeakSet

import grpc

from paceline.wire.exchange import half_close

Opening = TypeVar("Opening")


class ReopeningChannel(grpc.aio.Channel, Generic[Opening]):
    """A channel that stubs use like any other."""

    def __init__(self, current: Callable[[], Opening], open_one: Callable[[Opening], grpc.aio.Channel]) -> None:
        """`current` returns the value that a channel is opened with: the same object until it changes."""
        self._current = current
        self._open_one = open_one
        self._opened = self._open()
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        """Former channels, by what closes them after their last call."""
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        former = dict(self._closing)
        for closing in former:
            closing.cancel()
        await asyncio.gather(*former, return_exceptions=True)
        for channel in former.values():
            await channel.close()  # a task that was cancelled before it began has closed nothing
        await self._opened.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._latest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._latest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._latest().channel.channel_ready()

    # A stub asks for these when it is made, and calls each result once per call.

    def unary_unary(self, method: str, *codec: Any, **named: Any) -> Any:
        return partial(self._call, "unary_unary", (method, *codec), named)

    def unary_stream(self, method: str, *codec: Any, **named: Any) -> Any:
        return partial(self._call, "unary_stream", (method, *codec), named)

    def stream_unary(self, method: str, *codec: Any, **named: Any) -> Any:
        return partial(self._call, "stream_unary", (method, *codec), named)

    def stream_stream(self, method: str, *codec: Any, **named: Any) -> Any:
        return partial(self._call, "stream_stream", (method, *codec), named)

    def _call(self, kind: str, codec: tuple[Any, ...], named: dict[str, Any], request: Any = None, **how: Any) -> Any:
        if self._is_closed:
            # gRPC reads freed memory where a method is asked for of a closed channel (seen with grpcio 1.85.3).
            raise grpc.aio.UsageError("Channel is closed.")
        opened = self._latest()
        call = getattr(opened.channel, kind)(*codec, **named)(request, **how)
        opened.calls.add(call)
        call.add_done_callback(opened.calls.discard)
        return call

    def _latest(self) -> "_Opened[Opening]":
        if not self._is_closed and self._current() is not self._opened.opening:
            closing = asyncio.create_task(self._opened.close_after_calls())
            self._closing[closing] = self._opened.channel
            closing.add_done_callback(self._closing.pop)
            self._opened = self._open()
        return self._opened

    def _open(self) -> "_Opened[Opening]":
        opening = self._current()
        return _Opened(opening, self._open_one(opening))


class _Opened(Generic[Opening]):
    def __init__(self, opening: Opening, channel: grpc.aio.Channel) -> None:
        self.opening = opening
        self.channel = channel
        # Weak, as in gRPC itself: an abandoned stream is cancelled when it is garbage-collected.
        self.calls: WeakSet[Any] = WeakSet()

    async def close_after_calls(self) -> None:
        try:
            for call in list(self.calls):
                if isinstance(call, grpc.aio.StreamStreamCall):
                    await half_close(call)
            while calls := list(self.calls):
                await asyncio.gather(*(call.code() for call in calls), return_exceptions=True)
        finally:
            await self.channel.close()
