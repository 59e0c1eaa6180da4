"""The switch for tracing, set by OpenTelemetry's standard variables and `--trace-file`.

Tracing is off, and the SDK is not imported, unless `OTEL_TRACES_EXPORTER` or `--trace-file` turns it on. Spans are sent
in the background; a slow or missing exporter loses spans and delays nothing.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import StartupError
from paceline.observe.spans.protocols import otlp_protocol

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@contextmanager
def tracing(service: str, trace_file: Path | None) -> Iterator["Tracer | None"]:
    """Yield the service's tracer, or None when tracing is off. On exit, send the remaining spans within a few seconds.

    Raise StartupError when a variable or the file is wrong.
    """
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    # What is disabled reads none of its variables: a wrong one does no harm.
    protocol = None if is_disabled else otlp_protocol(os.environ)
    if is_disabled or not (protocol or trace_file):
        yield None
        return
    with ExitStack() as stack:
        try:
            # These imports read some of the variables and may raise ValueError.
            from opentelemetry import propagate  # noqa: F401

            from paceline.observe.spans.provider import running_tracer

            tracer = stack.enter_context(running_tracer(service, protocol, trace_file))
        except ValueError as error:
            raise StartupError(f"tracing cannot be set up, one of the OTEL_ variables is wrong: {error}") from error
        yield tracer
