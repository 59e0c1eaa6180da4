"""Spans as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Each service is shown as a process. Its spans lie in rows without overlap, named after their root spans. Clocks of
different machines differ by more than a hop takes, so a service's span is centered within the call that caused it, with
half of the call's wire time on each side. Its position is thus an estimate; its duration is measured.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.files import replace_file
from paceline.observe.records import SpanRecord


def write_perfetto(spans: Iterable[SpanRecord], path: Path) -> None:
    """Write the trace to a file. Raise InvalidRequest when it cannot be written."""
    replace_file(path, json.dumps({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}))


def trace_events(spans: Iterable[SpanRecord]) -> list[dict[str, Any]]:
    """Return complete events (`X`), in microseconds since the first span, and the names of processes and rows."""
    spans = aligned(list(spans))
    origin_ns = min((span.start_ns for span in spans), default=0)
    processes = {key: number for number, key in enumerate(sorted({_process(span) for span in spans}), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": service}}
        for (service, _), number in processes.items()
    ]
    rows = _rows(spans)
    named = sorted({(processes[_process(span)], *rows[span.trace_id, span.span_id]) for span in spans})
    tracks = {row: number for number, row in enumerate(named, 1)}
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tracks[pid, name, row], "args": {"name": f"{name} {row}"}}
        for pid, name, row in named
    ]
    for span in spans:
        pid = processes[_process(span)]
        links = [f"{link.trace_id}/{link.span_id}" for link in span.links]
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": pid,
                "tid": tracks[pid, *rows[span.trace_id, span.span_id]],
                "ts": (span.start_ns - origin_ns) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {**span.attributes, "trace_id": span.trace_id, "span_id": span.span_id, "links": links},
            }
        )
    return events


def _process(span: SpanRecord) -> tuple[str, str]:
    return span.service, span.instance


def aligned(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    """Center every span that another process caused within its parent, and move its descendants with it."""
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    shifts: dict[tuple[str, str], int] = {}

    def shift_ns(span: SpanRecord) -> int:
        key = (span.trace_id, span.span_id)
        if key not in shifts:
            shifts[key] = 0  # also where a damaged file has spans that are their own cause
            parent = by_id.get((span.trace_id, span.parent_id or ""))
            if parent is None:
                return 0
            if _process(parent) == _process(span):
                shifts[key] = shift_ns(parent)
            else:
                middles = parent.start_ns + parent.end_ns - span.start_ns - span.end_ns
                shifts[key] = shift_ns(parent) + middles // 2
        return shifts[key]

    return [
        replace(span, start_ns=span.start_ns + moved, end_ns=span.end_ns + moved)
        for span, moved in [(span, shift_ns(span)) for span in spans]
    ]


def _rows(spans: Sequence[SpanRecord]) -> dict[tuple[str, str], tuple[str, int]]:
    """Assign rows. A span shares the row of its parent in its process; without one, it gets the first free of its name.

    So does a child that overlaps another: outputs of one request have their rounds side by side.
    """
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    ends: defaultdict[tuple[tuple[str, str], str], list[int]] = defaultdict(list)
    last_ends: dict[tuple[str, str], int] = {}  # of the last child in the parent's row, by parent
    rows: dict[tuple[str, str], tuple[str, int]] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, -one.end_ns)):
        parent = by_id.get((span.trace_id, span.parent_id or ""))
        cause = (span.trace_id, span.parent_id or "")
        is_within = parent and _process(parent) == _process(span) and cause in rows
        if is_within and last_ends.get(cause, span.start_ns) <= span.start_ns:
            rows[span.trace_id, span.span_id] = rows[cause]
            last_ends[cause] = span.end_ns
            continue
        taken = ends[_process(span), span.name]
        row = next((number for number, end_ns in enumerate(taken) if end_ns <= span.start_ns), len(taken))
        taken[row : row + 1] = [span.end_ns]
        rows[span.trace_id, span.span_id] = (span.name, row + 1)
    return rows
