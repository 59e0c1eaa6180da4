"""The exporter of `--trace-file`, which writes ended spans to a file, one JSON object per line."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from paceline.errors import StartupError
from paceline.observe.records import EventRecord, LinkRecord, SpanRecord, to_line

log = structlog.get_logger()

BLOCK_BYTES = 1 << 16
BEGINNING = b'{"name":'
"""What every line begins with."""


class FileExporter(SpanExporter):
    def __init__(self, path: Path) -> None:
        """Open `path` for appending. Raise StartupError when it cannot be written."""
        self._path = path
        try:
            _cut_stump(path)
            # Without a buffer, which would write the rest of a line whose beginning is cut by then.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(f"--trace-file {path} cannot be written: {error}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(to_line(to_record(span)) + "\n" for span in spans).encode()
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as error:
            with suppress(OSError):
                _cut_stump(self._path)
            log.warning("spans were lost: the trace file cannot be written", error=str(error), spans=len(spans))
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with suppress(OSError):  # some file systems tell only now that a write failed
            self._file.close()


def _cut_stump(path: Path) -> None:
    """Take away what a killed process or a full disk left of a span: the next one would be written behind it.

    What is no span stays, for the file is another's.
    """
    if not path.is_file():
        return
    with path.open("r+b") as file:
        place = _last_line(file)
        file.seek(place)
        if BEGINNING.startswith(file.read(len(BEGINNING))):
            file.truncate(place)


def _last_line(file: BinaryIO) -> int:
    """Return the place behind the last end of a line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        if (place := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + place + 1
        end = begin
    return 0


def to_record(span: ReadableSpan) -> SpanRecord:
    assert span.context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    resource = span.resource.attributes
    return SpanRecord(
        name=span.name,
        trace_id=format_trace_id(span.context.trace_id),
        span_id=format_span_id(span.context.span_id),
        parent_id=format_span_id(span.parent.span_id) if span.parent else None,
        kind=span.kind.name.lower(),
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        start_ns=span.start_time,
        end_ns=span.end_time,
        is_error=span.status.status_code is StatusCode.ERROR,
        attributes=dict(span.attributes or {}),
        links=tuple(
            LinkRecord(
                format_trace_id(link.context.trace_id),
                format_span_id(link.context.span_id),
                dict(link.attributes or {}),
            )
            for link in span.links
        ),
        events=tuple(EventRecord(event.name, event.timestamp, dict(event.attributes or {})) for event in span.events),
    )
