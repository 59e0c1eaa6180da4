"""What channels and servers are handed so that their calls have spans.

Nothing of OpenTelemetry is loaded where there is no tracer: its import alone reads its variables, and fails if one is
wrong.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from paceline.observe.spans.lean import LeanTracer


def traced_channel(tracer: "Tracer | None") -> Callable[[grpc.aio.Channel, str], grpc.aio.Channel] | None:
    """For `open_channel`: calls have spans; requests on streams with this project's own tracer only."""
    if tracer is None:
        return None
    from paceline.observe.spans.client import TracedChannel

    return lambda channel, address: TracedChannel(channel, tracer, address)


def traced_calls(tracer: "Tracer | None") -> list[grpc.aio.ServerInterceptor]:
    """For `running_server`: each call has a span, as a child of its caller's."""
    if tracer is None:
        return []
    from paceline.observe.spans.server import TracingInterceptor

    return [TracingInterceptor(tracer)]


def traced_requests(tracer: "LeanTracer | None") -> Callable[[str, Any], AbstractContextManager[object]] | None:
    """For `Exchanges`: each request of a stream has a span, as a call has."""
    if tracer is None:
        return None
    from paceline.observe.spans.request_spans import RequestSpans

    return RequestSpans(tracer).request
