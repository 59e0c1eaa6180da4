"""Bodies that are not read to their end before the answer is there, because it is a refusal.

A connection that is closed in the midst of a body is reset, and most clients and proxies never see the answer. nginx
made 502 of it: its connections end with each answer unless it is told to keep them. What is left on a connection that
is kept the server reads away by itself.
"""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.gateway.reading import BODY_TIMEOUT_S

Headers = list[tuple[bytes, bytes]]


class ReadsAway:
    """Has answers that end their connection wait for the rest of the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive)

        async def send_when_read(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_last(scope, message.get("headers", [])):
                await body.read_away()
            await send(message)

        await self._app(scope, body.receive, send_when_read)


class _Body:
    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._ends_at_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
        self._is_awaited = scope["http_version"] == "1.0" or not expects
        """Whether it comes in any case. A client that expects 100 sends it when it is asked for."""
        self._is_whole = False

    async def receive(self) -> Message:
        self._is_awaited = True
        message = await self._receive()
        self._is_whole = not message.get("more_body", False)
        return message

    async def read_away(self) -> None:
        # Cancelled by nothing but the end of the server, which lets an answer be sent yet.
        with suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout_at(self._ends_at_s):
                while self._is_awaited and not self._is_whole:
                    await self.receive()


def _is_last(scope: Scope, answered: Headers) -> bool:
    """Whether a connection ends with an answer, by the headers of both."""
    both = (*scope["headers"], *answered)
    words = (word for name, value in both if name == b"connection" for word in value.lower().split(b","))
    return scope["http_version"] == "1.0" or b"close" in map(bytes.strip, words)
