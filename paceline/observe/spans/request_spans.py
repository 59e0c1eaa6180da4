"""Spans of requests on streams: one per request, with its `queue_wait` and `execute` below it.

The facts are noted while a request is served; the spans are made later (see `LeanTracer.later`).
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from paceline.observe.spans.conventions import end_call, start_call
from paceline.observe.spans.hop import caller_of
from paceline.observe.spans.lean import LeanTracer
from paceline.observe.spans.served import ServedRequest
from paceline.wire.status import code_of, cut_off_code


class RequestSpans:
    def __init__(self, tracer: LeanTracer) -> None:
        self._tracer = tracer

    @contextmanager
    def request(self, method: str, request: Any) -> Iterator[None]:
        """Trace the request that the block serves like a separate call, if its `RequestContext` names a span."""
        caller = caller_of(request)
        if caller is None:
            yield
            return
        context, span = caller
        served = ServedRequest(method, span, self._tracer.new_span_id())
        token = contexts.attach(trace.set_span_in_context(served, context))
        try:
            yield
        except asyncio.CancelledError:
            served.code = _cut_off_code(request, time.time_ns() - served.began_ns)
            raise
        except Exception as error:
            served.code = code_of(error)
            raise
        finally:
            contexts.detach(token)
            served.ended_ns = time.time_ns()
            self._tracer.later(partial(self._make, served))

    def _make(self, served: ServedRequest) -> None:
        caller = trace.set_span_in_context(trace.NonRecordingSpan(served.caller))
        span = start_call(
            self._tracer,
            served.method,
            SpanKind.SERVER,
            caller,
            start_time=served.began_ns,
            span_id=served.get_span_context().span_id,
        )
        if span.is_recording() and (timing := served.timing):
            around = trace.set_span_in_context(span)
            began_ns = served.asked_ns + round(timing.queued_s * 1e9)
            ended_ns = began_ns + round(timing.executed_s * 1e9)
            self._tracer.start_span("queue_wait", around, start_time=served.asked_ns).end(began_ns)
            self._tracer.start_span("execute", around, start_time=began_ns).end(ended_ns)
        end_call(span, SpanKind.SERVER, served.code, served.ended_ns)


def _cut_off_code(request: Any, elapsed_ns: int) -> grpc.StatusCode:
    timeout_s = request.timeout_s if request.HasField("timeout_s") else None
    return cut_off_code((timeout_s or 0.0) - elapsed_ns / 1e9, timeout_s)
