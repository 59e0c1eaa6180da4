"""Spans of model work: how long a call waited for the model's thread, and how long it ran there."""

from opentelemetry import trace
from opentelemetry.trace import Tracer

from paceline.types import CallTiming


def record_work(tracer: Tracer, asked_ns: int, timing: CallTiming) -> None:
    """Add `queue_wait` and `execute` to the current call's span; `asked_ns` is the time of day it was queued at."""
    if not trace.get_current_span().is_recording():
        return
    began_ns = asked_ns + round(timing.queued_s * 1e9)
    tracer.start_span("queue_wait", start_time=asked_ns).end(began_ns)
    tracer.start_span("execute", start_time=began_ns).end(began_ns + round(timing.executed_s * 1e9))
