"""Made-up spans of requests with known hops, for readers of spans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from paceline.observe.records import LinkRecord, SpanRecord
from paceline.observe.report.analysis import CALL_HOPS, PART_WORDS, PARTS, ROUND_HOPS

MILLISECOND_NS = 1_000_000
Hops = dict[str, int]
"""Milliseconds of a round by hop, for all of `ROUND_HOPS`."""


@dataclass(frozen=True)
class Timeline:
    spans: list[SpanRecord]
    """The request, then its rounds and what is before them, then the shared spans."""
    latency_ms: int
    told: list[Hops]
    """The rounds as the spans tell them: before its first round all time is in the queue."""


def timeline(
    rounds: Sequence[Hops], before_ms: int = 0, after_ms: int = 0, skew_ms: int = 0, number: int = 1
) -> Timeline:
    """Return one request with these rounds; all requests start at the same time.

    `skew_ms` is how far the services' clocks are ahead of the coordinator's.
    """
    ids = count(number * 10_000)
    trace_id, span_id = f"{number:032x}", f"{next(ids):016x}"
    now_ms = 1000
    began_ms, now_ms = now_ms, now_ms + before_ms
    own: list[SpanRecord] = []
    shared: list[SpanRecord] = []
    first, *others = rounds
    told = [first | {"queued": first["queued"] + first["waiting"], "waiting": 0}, *others]
    for hops in told:
        began_round_ms = now_ms + hops["queued"] + hops["waiting"]
        if hops["queued"]:
            own.append(_span("queue", trace_id, next(ids), span_id, now_ms + hops["waiting"], hops["queued"]))
        now_ms += sum(hops.values())
        made = list(_shared(hops, began_round_ms, LinkRecord(trace_id, span_id), ids, skew_ms))
        own_round = _span("round", trace_id, next(ids), span_id, began_round_ms, now_ms - began_round_ms)
        link = LinkRecord(made[0].trace_id, made[0].span_id)
        own.append(replace(own_round, attributes=_attributes(hops), links=(link,)))
        shared += made
    now_ms += after_ms
    request = SpanRecord(
        *("generate", trace_id, span_id, None, "server", "paceline-coordinator", "c"),
        *(began_ms * MILLISECOND_NS, now_ms * MILLISECOND_NS),
        attributes={"rpc.response.status_code": "OK"},
    )
    return Timeline([request, *own, *shared], now_ms - began_ms, told)


def _attributes(hops: Hops) -> dict[str, float]:
    attributes: dict[str, float] = {"paceline.group_size": 1, "paceline.drafted_count": 5, "paceline.accepted_count": 2}
    for service, name in CALL_HOPS.items():
        for part, word in zip(PARTS, PART_WORDS, strict=True):
            attributes[f"paceline.{service}.{word}"] = hops[f"{name} {part}"] / 1e3
    return attributes


def _shared(hops: Hops, start_ms: int, link: LinkRecord, ids: Iterator[int], skew_ms: int) -> Iterator[SpanRecord]:
    round_id = f"{next(ids):016x}"
    trace_id = f"{next(ids):032x}"
    end_ms = start_ms + sum(hops[hop] for hop in ROUND_HOPS if hop not in ("queued", "waiting"))
    whole = _span("shared_round", trace_id, 0, None, start_ms, end_ms - start_ms)
    yield replace(whole, span_id=round_id, links=(link,))
    for service, name in CALL_HOPS.items():
        wire_ms, queue_ms, execute_ms = (hops[f"{name} {part}"] for part in PARTS)
        call = _span(f"{service}.call", trace_id, next(ids), round_id, start_ms, wire_ms + queue_ms + execute_ms)
        call = replace(call, kind="client")
        served = _span(f"{service}.call", trace_id, next(ids), call.span_id, start_ms + skew_ms, queue_ms + execute_ms)
        served = replace(served, kind="server", service=service, instance=service)
        work = _span("execute", trace_id, next(ids), served.span_id, start_ms + skew_ms + queue_ms, execute_ms)
        yield from (call, served, replace(work, service=service, instance=service))
        start_ms += wire_ms + queue_ms + execute_ms


def _span(name: str, trace_id: str, number: int, parent: str | None, start_ms: int, duration_ms: int) -> SpanRecord:
    start_ns = start_ms * MILLISECOND_NS
    end_ns = start_ns + duration_ms * MILLISECOND_NS
    service = "paceline-coordinator"
    return SpanRecord(name, trace_id, f"{number:016x}", parent, "internal", service, "c", start_ns, end_ns)
