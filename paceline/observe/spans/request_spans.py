"""Spans of requests on streams: one per request, with its `queue_wait` and `execute` below it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from paceline.observe.spans.conventions import end_call, start_call, starts_trace
from paceline.observe.spans.hop import caller_of
from paceline.types import CallTiming
from paceline.wire.status import code_of, cut_off_code

_TRACER = contexts.create_key("paceline-tracer")
"""Key of the tracer in the context of a traced request."""


class RequestSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, method: str, request: Any) -> Iterator[None]:
        """Trace the request that the block serves like a separate call.

        Outside any trace it is if it begins one (`conventions.starts_trace`).
        """
        caller = caller_of(request)
        if caller is None and starts_trace(method):
            caller = contexts.Context()
        if caller is None:
            yield
            return
        began_s, code = time.perf_counter(), grpc.StatusCode.OK
        span = start_call(self._tracer, method, SpanKind.SERVER, caller)
        context = trace.set_span_in_context(span, contexts.set_value(_TRACER, self._tracer, caller))
        token = contexts.attach(context)
        try:
            yield
        except asyncio.CancelledError:
            code = _cut_off_code(request, time.perf_counter() - began_s)
            raise
        except Exception as error:
            code = code_of(error)
            raise
        finally:
            contexts.detach(token)
            end_call(span, SpanKind.SERVER, code)


def record_work(asked_ns: int, timing: CallTiming) -> None:
    """Make the spans of work for the current request; `asked_ns` is the Unix time in ns when it was queued."""
    tracer = contexts.get_value(_TRACER)
    if isinstance(tracer, Tracer) and trace.get_current_span().is_recording():
        began_ns = asked_ns + round(timing.queued_s * 1e9)
        ended_ns = began_ns + round(timing.executed_s * 1e9)
        tracer.start_span("queue_wait", start_time=asked_ns).end(began_ns)
        tracer.start_span("execute", start_time=began_ns).end(ended_ns)


def _cut_off_code(request: Any, elapsed_s: float) -> grpc.StatusCode:
    timeout_s = request.timeout_s if request.HasField("timeout_s") else None
    return cut_off_code((timeout_s or 0.0) - elapsed_s, timeout_s)
