"""The switch for tracing, set by OpenTelemetry's standard variables and `--trace-file`.

Tracing is off, and the SDK is not imported, unless `OTEL_TRACES_EXPORTER` or `--trace-file` turns it on. Spans are sent
in the background; a slow or missing exporter loses spans and delays nothing.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import StartupError

if TYPE_CHECKING:
    from paceline.observe.spans.lean import LeanTracer

PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def tracing(service: str, trace_file: Path | None) -> Iterator["LeanTracer | None"]:
    """Yield the service's tracer, or None when tracing is off. On exit, send the remaining spans within a few seconds.

    Raise StartupError when a variable or the file is wrong.
    """
    sends_otlp = _sends_otlp(os.environ)
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or not (sends_otlp or trace_file):
        yield None
        return
    with ExitStack() as stack:
        try:
            # These imports read some of the variables and may raise ValueError.
            from opentelemetry import propagate  # noqa: F401

            from paceline.observe.spans.provider import running_tracer

            tracer = stack.enter_context(running_tracer(service, sends_otlp=sends_otlp, trace_file=trace_file))
        except ValueError as error:
            raise StartupError(f"tracing cannot be set up, one of the OTEL_ variables is wrong: {error}") from error
        yield tracer


def _sends_otlp(environment: Mapping[str, str]) -> bool:
    names = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "none").split(",") if name.strip()]
    for name in names:
        if name not in ("otlp", "none"):
            raise StartupError(f"OTEL_TRACES_EXPORTER is {name!r}; give otlp or none, and --trace-file for a file")
    for variable in PROTOCOL_VARIABLES:
        if environment.get(variable, "grpc") != "grpc":
            raise StartupError(f"{variable} is {environment[variable]!r}; spans are sent by grpc only: unset it")
    return "otlp" in names
