"""What an interceptor does to a handler: put its behaviour into another."""

from collections.abc import Callable
from typing import Any

import grpc

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


def wrap(handler: Any, *, unary: Callable[[Handler], Handler], stream: Callable[[Handler], Handler]) -> Any:
    """Return the handler with its behaviour within `unary` where it answers once, within `stream` where it goes on."""
    kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
    around = stream if handler.response_streaming else unary
    return handler._replace(**{kind: around(getattr(handler, kind))})


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"
