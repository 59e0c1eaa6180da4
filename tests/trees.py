"""The required form of a request's spans, however it ended."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.observe.records import SpanRecord


@dataclass(frozen=True)
class Tree:
    request: SpanRecord
    rounds: list[SpanRecord]
    calls: list[SpanRecord]
    """The coordinator's client spans in those rounds."""
    served: list[SpanRecord]
    """The services' spans of those calls."""


def tree_of(spans: Iterable[SpanRecord], trace_id: str, killed_ns: int = 0) -> Tree:
    """Check the last request of a trace from its span down to the model work, and return its parts.

    A service killed at `killed_ns` lost its last spans. Raise AssertionError if a span or a link is missing,
    has another parent, or is there twice.
    """
    spans = list(spans)
    children: defaultdict[tuple[str, str], list[SpanRecord]] = defaultdict(list)
    for span in spans:
        children[span.trace_id, span.parent_id or ""].append(span)
    requests = [one for one in spans if one.trace_id == trace_id and one.name == "generate" and one.kind == "server"]
    assert requests
    request = max(requests, key=lambda one: one.start_ns)
    rounds = [one for one in spans if one.name == "round" and _names(request, [one])]
    _check_links(request, rounds)
    calls = [call for one in rounds for call in children[one.trace_id, one.span_id]]
    served = []
    for one in rounds:
        assert one.parent_id is None
        names = [call.name for call in children[one.trace_id, one.span_id]]
        # A failed round may have been cut off anywhere.
        assert one.is_error or names in (["draft.propose", "target.verify"], ["target.verify"])
    for call in calls:
        assert call.kind == "client"
        served += _check_served(call, children, killed_ns)
    return Tree(request, rounds, calls, served)


def _names(request: SpanRecord, rounds: Sequence[SpanRecord]) -> bool:
    return any(
        (link.trace_id, link.span_id) == (request.trace_id, request.span_id) for one in rounds for link in one.links
    )


def _check_links(request: SpanRecord, rounds: Sequence[SpanRecord]) -> None:
    """Check that a round links its requests, and that requests still running at its end link it back."""
    linked = {(link.trace_id, link.span_id) for link in request.links}
    ended_in_time = {(one.trace_id, one.span_id) for one in rounds if one.end_ns <= request.end_ns and not one.is_error}
    assert ended_in_time <= linked <= {(one.trace_id, one.span_id) for one in rounds}


def _check_served(
    call: SpanRecord, children: dict[tuple[str, str], list[SpanRecord]], killed_ns: int
) -> list[SpanRecord]:
    """Check that an answered call has the service's span, and that this has its work; return the spans."""
    served = children[call.trace_id, call.span_id]
    if call.attributes["rpc.response.status_code"] != "OK" or (not served and call.start_ns < killed_ns):
        return served
    assert len(served) == 1
    server = served[0]
    assert (server.name, server.kind) == (call.name, "server")
    work = children[server.trace_id, server.span_id]
    assert [one.name for one in work] == ["queue_wait", "execute"]
    assert sum(one.duration_s for one in work) <= call.duration_s
    return served
