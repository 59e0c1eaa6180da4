"""The required form of a request's spans, however it ended."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.observe.records import SpanRecord

ROUNDS = ("prefill", "round")


@dataclass(frozen=True)
class Tree:
    request: SpanRecord
    children: list[SpanRecord]
    """The children of the request's span in its own trace, by start."""
    shared: list[SpanRecord]
    """The rounds that they link, which are roots of their own traces."""
    calls: list[SpanRecord]
    """The coordinator's client spans in those rounds."""
    served: list[SpanRecord]
    """The services' spans of those calls."""

    @property
    def rounds(self) -> list[SpanRecord]:
        return [one for one in self.children if one.name in ROUNDS]


def tree_of(spans: Iterable[SpanRecord], trace_id: str, killed_ns: int = 0) -> Tree:
    """Check the last request of a trace from its span down to the model work, and return its parts.

    A service killed at `killed_ns` lost its last spans. Raise AssertionError if a span or a link is missing,
    has another parent, or is there twice.
    """
    spans = list(spans)
    by_parent: defaultdict[tuple[str, str], list[SpanRecord]] = defaultdict(list)
    for span in spans:
        by_parent[span.trace_id, span.parent_id or ""].append(span)
    requests = [one for one in spans if one.trace_id == trace_id and one.name == "generate" and one.kind == "server"]
    assert requests
    request = max(requests, key=lambda one: one.start_ns)
    children = sorted(by_parent[trace_id, request.span_id], key=lambda one: (one.start_ns, one.end_ns))
    _check_children(request, children)
    shared = _shared(spans, children)
    calls = [call for one in shared for call in by_parent[one.trace_id, one.span_id]]
    served = []
    for one in shared:
        # A round need not wait for a call whose drafts it knows already: its span may come last.
        names = sorted(call.name for call in by_parent[one.trace_id, one.span_id])
        # A failed round may have been cut off anywhere.
        assert one.is_error or names in (["draft.propose", "target.verify"], ["target.verify"])
        assert one.parent_id is None
        assert (trace_id, request.span_id) in {(link.trace_id, link.span_id) for link in one.links}
    for call in calls:
        assert call.kind == "client"
        served += _check_served(call, by_parent, killed_ns)
    return Tree(request, children, shared, calls, served)


def _check_children(request: SpanRecord, children: list[SpanRecord]) -> None:
    """Check that the request's children lie within it, begin with its queue, and go on with its rounds in turn."""
    assert children and children[0].name == "queue"
    assert {one.name for one in children[:-1]} <= {"queue", *ROUNDS}
    assert children[-1].name in ("queue", *ROUNDS, "last_wait")
    # Those of the rounds that brought it tokens, and of others.
    assert len([one for one in children if one.name in ROUNDS]) >= request.attributes["paceline.round_count"]
    for child in children:
        assert request.start_ns <= child.start_ns <= child.end_ns <= request.end_ns
    for before, after in zip(children, children[1:], strict=False):
        assert before.end_ns <= after.start_ns


def _shared(spans: Iterable[SpanRecord], children: Iterable[SpanRecord]) -> list[SpanRecord]:
    """Return the rounds that the children link, each of which must be there."""
    found = {(one.trace_id, one.span_id): one for one in spans if one.name == "shared_round"}
    return [found[link.trace_id, link.span_id] for child in children for link in child.links]


def _check_served(
    call: SpanRecord, by_parent: dict[tuple[str, str], list[SpanRecord]], killed_ns: int
) -> list[SpanRecord]:
    """Check that an answered call has the service's span, and that this has its work; return the spans."""
    served = by_parent[call.trace_id, call.span_id]
    if call.attributes["rpc.response.status_code"] != "OK" or (not served and call.start_ns < killed_ns):
        return served
    assert len(served) == 1
    server = served[0]
    assert (server.name, server.kind) == (call.name, "server")
    work = by_parent[server.trace_id, server.span_id]
    assert [one.name for one in work] == ["queue_wait", "execute"]
    assert sum(one.duration_s for one in work) <= call.duration_s
    return served
