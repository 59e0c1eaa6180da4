"""Notes on a traced request while a model service works on it. `RequestSpans` makes its spans later."""

import time

import grpc
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext

from paceline.types import CallTiming


class ServedRequest(NonRecordingSpan):
    """The current span while the request is served, so that logs and exemplars name it."""

    def __init__(self, method: str, caller: SpanContext, span_id: int) -> None:
        """`caller` is the span that sent the request."""
        self.method = method
        self.caller = caller
        self.began_ns = self.ended_ns = time.time_ns()
        self.code = grpc.StatusCode.OK
        self.asked_ns = 0
        """Unix time in ns when its work was queued; 0 until then."""
        self.timing: CallTiming | None = None
        """Timing of its work; None until work has ended well."""
        super().__init__(SpanContext(caller.trace_id, span_id, False, caller.trace_flags, caller.trace_state))


def record_work(asked_ns: int, timing: CallTiming) -> None:
    """Note the work for the current request; `asked_ns` is the Unix time in ns when it was queued."""
    request = trace.get_current_span()
    if isinstance(request, ServedRequest):
        request.asked_ns, request.timing = asked_ns, timing
