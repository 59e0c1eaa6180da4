"""The interceptor that checks callers. It runs before `ErrorInterceptor`, so a stranger's request is never parsed."""

from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

import grpc
import structlog

from paceline.errors import PacelineError
from paceline.security.access import Check, Context
from paceline.wire.handlers import Handler, WrappingInterceptor, wrap
from paceline.wire.status import abort

log = structlog.get_logger()

_OPEN = "/grpc.health."


class AccessInterceptor(WrappingInterceptor):
    """Admits a call that passes every check. Health checks are open to all."""

    def __init__(self, checks: Collection[Check]) -> None:
        self._checks = tuple(checks)

    def concerns(self, method: str) -> bool:
        return not method.startswith(_OPEN)

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method: str = details.method
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
            check_caller(self._checks, method, context)
        except PacelineError as error:
            await abort(context, error)


def check_caller(checks: Iterable[Check], method: str, context: Context) -> None:
    """Raise the error of the first check that a caller does not pass."""
    try:
        for check in checks:
            check(method, context)
    except PacelineError as error:
        log.warning("a caller was refused", method=method, reason=error.reason, peer=context.peer())
        raise
