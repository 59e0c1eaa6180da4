"""Translation of the headers of W3C Trace Context, for requests on streams: these send their metadata only once."""

import re
from collections.abc import Mapping

from paceline.v1 import common_pb2

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")


def caller_to_pb(headers: Mapping[str, str]) -> common_pb2.CallerSpan | None:
    """Return the span that `traceparent` names, with all other headers; None without a valid one."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if not found:
        return None
    trace_id, span_id, flags = found.groups()
    others = {name: value for name, value in headers.items() if name != "traceparent"}
    return common_pb2.CallerSpan(
        trace_id=bytes.fromhex(trace_id), span_id=int(span_id, 16), trace_flags=int(flags, 16), headers=others
    )
