"""Server-sent events. A stream's status and headers go out with its first event, so until then it can be an error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients skip."""
SILENCE_S = 15.0
"""HTML's standard has a comment every 15 s or so. Proxies end connections on which nothing came for 50 or 60 s."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers an answer would undo the stream
]


def event(data: str) -> bytes:
    """Return the event of JSON, which has no line breaks."""
    return f"data: {data}\n\n".encode()


class EventStream:
    """Sends events in turn, from any number of tasks. The server makes a sender wait for a slow reader."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._sent_count = 0
        self.is_begun = False
        self.is_whole = False
        """Whether the last event has been sent."""

    async def send(self, events: bytes) -> None:
        if not events:
            return
        self._sent_count += 1
        async with self._turn:
            if not self.is_begun:
                self.is_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.is_whole = events.endswith(DONE)

    async def end(self) -> None:
        async with self._turn:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @asynccontextmanager
    async def pinged(self, silence_s: float, may_begin: Callable[[], bool]) -> AsyncIterator[None]:
        """Send comments while the block runs, whenever nothing was sent for once to twice `silence_s`.

        Not before `may_begin`: with a comment the stream begins, and a refusal is no longer a status.
        """
        pinging = asyncio.create_task(self._ping(silence_s, may_begin))
        try:
            yield
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    async def _ping(self, silence_s: float, may_begin: Callable[[], bool]) -> None:
        while not self.is_whole:
            sent_count = self._sent_count
            await asyncio.sleep(silence_s)
            # A reader that is waited for has something to read already.
            is_silent = self._sent_count == sent_count and not self._turn.locked() and not self.is_whole
            if is_silent and may_begin():
                await self.send(PING)
