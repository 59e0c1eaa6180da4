"""Every request has an id before anything else is done with it, and every answer tells it, an error too."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.request_ids import REQUEST_ID, request_id_of

NAME = REQUEST_ID.encode()


class RequestIds:
    """Gives a request the header with its id, whether its client sent one or not, and its answer the same."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = (NAME, request_id_of(Headers(scope=scope).get(REQUEST_ID, "")).encode())
        others = [one for one in scope["headers"] if one[0] != NAME]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app({**scope, "headers": [*others, header]}, receive, send_named)
