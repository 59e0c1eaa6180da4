"""Spans as `paceline trace` reads them, and their lines in a file.

Knows neither the OpenTelemetry SDK nor its wire format; `file_exporter` and `receiver` convert those into records.
"""

import glob
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

Attributes = Mapping[str, Any]

_NUMBERS = re.compile(r"paceline\.(.+_(s|count)|completion_index)")
"""Attributes that are added up, or tell outputs apart."""
_LARGEST = 2**64
"""What no time and no count of OpenTelemetry's reaches."""

# Made once: `json.dumps` would make an encoder for every span.
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class LinkRecord:
    trace_id: str
    span_id: str
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventRecord:
    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span. Ids are lower-case hexadecimal; times are nanoseconds on the clock of the machine that made the span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    kind: str
    """`internal`, `server` or `client`."""
    service: str
    instance: str
    """An id that differs between runs and replicas of one service."""
    start_ns: int
    end_ns: int
    is_error: bool = False
    attributes: Attributes = field(default_factory=dict)
    links: tuple[LinkRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def to_line(span: SpanRecord) -> str:
    fields = {name: getattr(span, name) for name in SpanRecord.__slots__}
    links = [[link.trace_id, link.span_id, link.attributes] for link in span.links]
    events = [[event.name, event.time_ns, event.attributes] for event in span.events]
    return _encode(fields | {"links": links, "events": events})


def from_line(line: str) -> SpanRecord:
    fields = json.loads(line)
    if fields["parent_id"] is not None:
        _check(fields, "parent_id", str, "text")
    for name in ("name", "trace_id", "span_id", "kind", "service", "instance"):
        _check(fields, name, str, "text")
    for name in ("start_ns", "end_ns"):
        if type(fields[name]) is not int or not 0 <= fields[name] < _LARGEST:
            raise ValueError(f"{name} is {fields[name]!r} and no time in nanoseconds")
    _check(fields, "attributes", dict, "object")
    check_numbers(fields["attributes"])
    links = tuple(LinkRecord(*link) for link in fields["links"])
    events = tuple(EventRecord(*event) for event in fields.get("events", ()))  # 0.1.0 wrote none
    return SpanRecord(**fields | {"links": links, "events": events})


def check_numbers(attributes: Attributes) -> None:
    """Raise ValueError for an attribute that reports count with, where it is no number."""
    for name, value in attributes.items():
        # Written so that NaN is refused too.
        is_number = type(value) in (int, float) and abs(value) < _LARGEST
        if not is_number and _NUMBERS.fullmatch(name):
            raise ValueError(f"{name} is {value!r} and no number")


def _check(fields: Mapping[str, Any], name: str, kind: type, word: str) -> None:
    if type(fields[name]) is not kind:
        raise ValueError(f"{name} is {fields[name]!r} and no {word}")


def read_spans(patterns: Iterable[str]) -> list[SpanRecord]:
    """Read the spans in files, globs and the `.jsonl` files of folders.

    A truncated last line, as a killed process leaves it, is skipped. Raise InvalidRequest, naming file and line.
    """
    return [span for path in span_files(patterns) for span in _read(path)]


def span_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files that `read_spans` reads; a name that nothing has is among them, for reading to tell so."""
    found: list[str] = []
    for pattern in patterns:
        paths = glob.glob(f"{glob.escape(pattern)}/*.jsonl" if Path(pattern).is_dir() else pattern)
        found += sorted(paths) or [pattern]
    return [Path(path) for path in found]


def _read(path: Path) -> list[SpanRecord]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error
    spans = []
    for number, line in enumerate(lines[:-1], 1):  # text after the last line end is a truncated line
        try:
            spans.append(from_line(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequest(f"line {number} of {path} is no span that --trace-file wrote: {error}") from error
    return spans
