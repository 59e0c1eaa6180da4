"""Checks who calls, before the request is parsed. Health checks are open to all."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import structlog

from paceline.errors import PacelineError
from paceline.rpc.status import abort
from paceline.security.access import Check, Context

log = structlog.get_logger()

_OPEN = "/grpc.health."


class AccessInterceptor(grpc.aio.ServerInterceptor):
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
        guard = self._guard_stream if handler.response_streaming else self._guard_unary
        if handler.request_streaming:
            kind = "stream_stream" if handler.response_streaming else "stream_unary"
            return handler._replace(**{kind: guard(getattr(handler, kind), method, _as_it_is)})
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        # gRPC would parse before it calls; without its deserializer it hands over bytes.
        guarded = guard(getattr(handler, kind), method, handler.request_deserializer or _as_it_is)
        return handler._replace(**{kind: guarded, "request_deserializer": None})

    def _guard_unary(self, behavior: Callable[..., Any], method: str, parse: Callable[[Any], Any]) -> Any:
        async def guarded(request: Any, context: Context) -> Any:
            await self._check(method, context)
            return await behavior(parse(request), context)

        return guarded

    def _guard_stream(self, behavior: Callable[..., Any], method: str, parse: Callable[[Any], Any]) -> Any:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._check(method, context)
            async for response in behavior(parse(request), context):
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


def _as_it_is(request: Any) -> Any:
    return request
