"""The span of a request, below its caller's. Without a tracer that is passed on, and OpenTelemetry is not loaded."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.request_ids import REQUEST_ID

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACE_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARACTERS = 512
"""gRPC's metadata takes 8 KiB in all; W3C asks for no more than this."""


def callers_trace(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that name the caller's trace, but for values that metadata cannot carry."""
    return _carried({name: headers[name] for name in TRACE_HEADERS if name in headers})


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those of the headers whose values metadata can carry on."""
    return {
        name: value
        for name, value in headers.items()
        if value.isascii() and value.isprintable() and len(value) <= MAX_HEADER_CHARACTERS
    }


@contextmanager
def request_span(
    tracer: "Tracer | None", path: str, scheme: str, headers: Mapping[str, str], status: Callable[[], int]
) -> Iterator[None]:
    """Make the span current while the block runs; at its end ask for the answer's status."""
    if tracer is None:
        yield
        return
    from opentelemetry import propagate
    from opentelemetry.trace import SpanKind, StatusCode

    attributes = {"http.request.method": "POST", "http.route": path, "url.path": path, "url.scheme": scheme}
    attributes["paceline.request_id"] = headers.get(REQUEST_ID, "")
    parent = propagate.extract(_carried(headers))
    with tracer.start_as_current_span(
        f"POST {path}", parent, SpanKind.SERVER, attributes, record_exception=False
    ) as span:
        try:
            yield
        finally:
            code = status()
            span.set_attribute("http.response.status_code", code)
            if code >= 500:
                span.set_attribute("error.type", str(code))
                span.set_status(StatusCode.ERROR)
