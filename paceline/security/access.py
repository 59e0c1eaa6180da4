"""Who may call: names in certificates, bearer tokens. Health checks are open to all."""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc

from paceline.errors import PermissionDenied, Unauthenticated
from paceline.security.files import WatchedFile

Context = grpc.aio.ServicerContext[Any, Any]
Check = Callable[[Context], None]
"""Raises Unauthenticated or PermissionDenied."""

_OPEN_PREFIX = "/grpc.health."
_SCHEME = "Bearer "


def allowed_names(names: Collection[str]) -> Check:
    """Let callers in whose certificate bears one of the names: a subject alternative name or the common name."""
    allowed = {name.encode() for name in names}

    def check(context: Context) -> None:
        # auth_context() is missing from the types of grpc.aio.
        shown: dict[str, list[bytes]] = context.auth_context()  # type: ignore[attr-defined]
        own = {*shown.get("x509_subject_alternative_name", ()), *shown.get("x509_common_name", ())}
        if not own & allowed:
            raise PermissionDenied("the caller's certificate bears none of the names that this service lets in")

    return check


def bearer_tokens(file: WatchedFile) -> Check:
    """Let callers in that send one of the file's tokens, one a line, as `authorization: Bearer TOKEN`."""

    def check(context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        given = str(metadata.get("authorization", ""))
        token = given.removeprefix(_SCHEME).encode()
        tokens = [line.strip() for line in file.content().splitlines() if line.strip()]
        # Every token is compared, and in constant time, so that time tells nothing.
        matches = [hmac.compare_digest(token, known) for known in tokens]
        if not given.startswith(_SCHEME) or not any(matches):
            raise Unauthenticated("no valid token; send the metadata `authorization: Bearer TOKEN`")

    return check


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Runs the checks before every method but health checks."""

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = tuple(checks)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        kind = next(
            kind
            for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
            if getattr(handler, kind) is not None
        )
        guard = self._guard_stream if handler.response_streaming else self._guard_unary
        return handler._replace(**{kind: guard(getattr(handler, kind))})

    def _guard_unary(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            self._check(context)
            return await behavior(request, context)

        return guarded

    def _guard_stream(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            self._check(context)
            async for response in behavior(request, context):
                yield response

        return guarded

    def _check(self, context: Context) -> None:
        for check in self._checks:
            check(context)
