"""The base of interceptors that wrap a handler's behavior in another."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


def is_own(method: str) -> bool:
    """Return whether a method is of Paceline's own services, and not of a standard one such as health checks."""
    return method.startswith("/paceline.")


class WrappingInterceptor(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        is_concerned = handler is not None and self.concerns(handler_call_details.method)
        return self.wrapped(handler, handler_call_details) if is_concerned else handler

    def concerns(self, method: str) -> bool:
        """Return whether the interceptor handles this method; by default, every method of Paceline's own services."""
        return is_own(method)

    @abstractmethod
    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler itself or a handler that wraps it."""


def wrap(handler: Any, *, unary: Callable[[Handler], Handler], stream: Callable[[Handler], Handler]) -> Any:
    """Return the handler with its behavior wrapped: by `unary` for a single response, by `stream` for a stream."""
    kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
    around = stream if handler.response_streaming else unary
    return handler._replace(**{kind: around(getattr(handler, kind))})


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"
