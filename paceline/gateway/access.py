"""Who may call: whoever shows a token of the file, where there is one. Health and the page are open to all."""

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.gateway.errors import HttpError
from paceline.request_ids import REQUEST_ID
from paceline.security.tokens import KnownTokens

log = structlog.get_logger()
LIVENESS_PATH = "/health/live"
"""Says that the process answers, whatever its coordinators do: a restart would help none of them."""
OPEN_PATHS = ("/", "/health", LIVENESS_PATH)
PAGE_PATH = "/page/"
REFUSED = HttpError(
    401,
    "no valid token was shown; send `Authorization: Bearer TOKEN`",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


class BearerTokens:
    """Lets requests through that show a token, and those for open paths."""

    def __init__(self, app: ASGIApp, tokens: KnownTokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(request := Request(scope)):
            await self._app(scope, receive, send)
            return
        log.warning("a caller was refused", peer=scope.get("client"), request_id=request.headers.get(REQUEST_ID))
        await REFUSED.response(scope, receive, send)

    def _admits(self, request: Request) -> bool:
        path = request.scope["path"]
        if path in OPEN_PATHS or path.startswith(PAGE_PATH):
            return True
        return self._tokens.admit(request.headers.get("authorization", ""))
