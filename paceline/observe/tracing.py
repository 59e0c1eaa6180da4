"""Wrappers that give the calls of channels and servers spans.

OpenTelemetry is not loaded without a tracer, because its import reads its variables and fails when one is wrong.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def traced_channel(tracer: "Tracer | None") -> Callable[[grpc.aio.Channel, str], grpc.aio.Channel] | None:
    """Return a wrapper for `open_channel` that gives calls spans."""
    if tracer is None:
        return None
    from paceline.observe.spans.client import TracedChannel

    return lambda channel, address: TracedChannel(channel, tracer, address)


def traced_call(tracer: "Tracer | None", method: str, address: str) -> AbstractContextManager[Mapping[str, str]]:
    """Return a context that gives the call of its block a span, and the headers that name it to the server."""
    if tracer is None:
        return nullcontext({})
    from paceline.observe.spans.client import call_span

    return call_span(tracer, method, address)


def traced_calls(tracer: "Tracer | None") -> list[grpc.aio.ServerInterceptor]:
    """Return interceptors for `running_server` that give each call a span below its caller's."""
    if tracer is None:
        return []
    from paceline.observe.spans.server import TracingInterceptor

    return [TracingInterceptor(tracer)]


def traced_requests(tracer: "Tracer | None") -> Callable[[str, Any], AbstractContextManager[object]] | None:
    """Return the `around` of `Exchanges` that gives each request of a stream a span."""
    if tracer is None:
        return None
    from paceline.observe.spans.request_spans import RequestSpans

    return RequestSpans(tracer).request
