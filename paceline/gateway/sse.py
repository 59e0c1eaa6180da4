"""Server-sent events. A stream's status and headers go out with its first event, so until then it can be an error."""

import asyncio

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
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
        self.is_begun = False
        self.is_whole = False
        """Whether the last event has been sent."""

    async def send(self, events: bytes) -> None:
        if not events:
            return
        async with self._turn:
            if not self.is_begun:
                self.is_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.is_whole = events.endswith(DONE)

    async def end(self) -> None:
        async with self._turn:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
