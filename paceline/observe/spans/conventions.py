"""Names, attributes and statuses of a call's span, by OpenTelemetry's semantic conventions 1.44.

To a client any code except OK is an error; to a server only the codes that are its own fault are.
"""

from collections.abc import Mapping

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from paceline.codec.names import GENERATE_STREAM, GENERATE_TEXT, PROPOSE_TOKENS, VERIFY_TOKENS

SPAN_NAMES = {
    GENERATE_TEXT: "generate",
    GENERATE_STREAM: "generate",
    PROPOSE_TOKENS: "draft.propose",
    VERIFY_TOKENS: "target.verify",
}
_SERVER_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


def _span_name(method: str) -> str:
    """Return a short name for calls of the hot path, else the convention's `package.Service/Method`."""
    return SPAN_NAMES.get(method, method.removeprefix("/"))


def starts_trace(method: str) -> bool:
    """Return whether a call outside any trace begins one. Health, descriptions and releases would only be noise."""
    return method in (GENERATE_TEXT, GENERATE_STREAM)


def start_call(
    tracer: Tracer,
    method: str,
    kind: SpanKind,
    context: Context | None = None,
    server: Mapping[str, str | int] = {},
) -> Span:
    """Start a call's span. `server` has a client's attributes of the server."""
    attributes = {**server, "rpc.system.name": "grpc", "rpc.method": method.removeprefix("/")}
    return tracer.start_span(_span_name(method), context, kind, attributes)


def end_call(span: Span, kind: SpanKind, code: grpc.StatusCode, end_ns: int | None = None) -> None:
    """Set the status of a call's span and end it at `end_ns`; None for now."""
    span.set_attribute("rpc.response.status_code", code.name)
    if code is not grpc.StatusCode.OK and (kind is SpanKind.CLIENT or code in _SERVER_FAULTS):
        span.set_attribute("error.type", code.name)
        span.set_status(StatusCode.ERROR)
    span.end(end_ns)
