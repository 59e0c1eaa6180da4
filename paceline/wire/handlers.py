"""What an interceptor does to handlers: put the behaviour of each into another."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


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
        """Whether calls of this method pass here: those of our own services, where nothing else is said."""
        return method.startswith("/paceline.")

    @abstractmethod
    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler, or another around it."""


def wrap(handler: Any, *, unary: Callable[[Handler], Handler], stream: Callable[[Handler], Handler]) -> Any:
    """Return the handler with its behaviour within `unary` where it answers once, within `stream` where it goes on."""
    kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
    around = stream if handler.response_streaming else unary
    return handler._replace(**{kind: around(getattr(handler, kind))})


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"
