"""Checks who calls. Stands outside `ErrorInterceptor`, which parses: a stranger's request is never looked at."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import structlog

from paceline.errors import PacelineError
from paceline.security.access import Check, Context
from paceline.wire.handlers import Handler, wrap
from paceline.wire.status import abort

log = structlog.get_logger()

_OPEN = "/grpc.health."


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through when it passes every check. Health checks are open to all."""

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = tuple(checks)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(_OPEN):
            return handler
        return wrap(
            handler,
            unary=lambda behavior: self._guard_unary(behavior, method),
            stream=lambda behavior: self._guard_stream(behavior, method),
        )

    def _guard_unary(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            await self._check(method, context)
            return await behavior(request, context)

        return guarded

    def _guard_stream(self, behavior: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(method, context)
            async for response in behavior(request, context):
                yield response

        return guarded

    async def _check(self, method: str, context: Context) -> None:
        """Abort the call unless it passes every check."""
        try:
            for check in self._checks:
                check(method, context)
        except PacelineError as error:
            log.warning("a caller was refused", method=method, reason=error.reason, peer=context.peer())
            await abort(context, error)
