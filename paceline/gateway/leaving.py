"""A gateway that drains ends the connection of each answer: the next request on it would come here again."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.gateway.running import Running

CLOSE = (b"connection", b"close")


class EndsConnections:
    """Has answers end their connection while the gateway drains."""

    def __init__(self, app: ASGIApp, running: Running) -> None:
        self._app = app
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._running.is_draining:
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            await send(message)

        await self._app(scope, receive, send_last)
