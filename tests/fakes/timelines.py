"""Made-up spans of requests with known hops, for readers of spans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from paceline.observe.records import LinkRecord, SpanRecord
from paceline.observe.report.analysis import CALL_HOPS, PARTS, ROUND_HOPS

MILLISECOND_NS = 1_000_000
Hops = dict[str, int]
"""Milliseconds of a round by hop, for all of `ROUND_HOPS`."""


@dataclass(frozen=True)
class Timeline:
    spans: list[SpanRecord]
    latency_ms: int


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
    spans: list[SpanRecord] = []
    links: list[LinkRecord] = []
    for hops in rounds:
        waited_ms = hops["queued"] + hops["waiting"]
        made = list(_round(hops, now_ms + waited_ms, LinkRecord(trace_id, span_id), ids, skew_ms))
        links.append(LinkRecord(made[0].trace_id, made[0].span_id))
        spans += made
        now_ms += sum(hops.values())
    now_ms += after_ms
    request = SpanRecord(
        *("generate", trace_id, span_id, None, "server", "paceline-coordinator", "c"),
        *(began_ms * MILLISECOND_NS, now_ms * MILLISECOND_NS),
        attributes={"rpc.response.status_code": "OK"},
        links=tuple(links),
    )
    return Timeline([request, *spans], now_ms - began_ms)


def _round(hops: Hops, start_ms: int, link: LinkRecord, ids: Iterator[int], skew_ms: int) -> Iterator[SpanRecord]:
    round_id = f"{next(ids):016x}"
    trace_id = f"{next(ids):032x}"
    attributes: dict[str, float | list[float]] = {
        "paceline.group_size": 1,
        "paceline.request.queued_s": [hops["queued"] / 1e3],
        "paceline.request.waited_s": [hops["waiting"] / 1e3],
        "paceline.request.committed_count": [2],
    }
    end_ms = start_ms + sum(hops[hop] for hop in ROUND_HOPS if hop not in ("queued", "waiting"))
    children = []
    for service, name in CALL_HOPS.items():
        wire_ms, queue_ms, execute_ms = (hops[f"{name} {part}"] for part in PARTS)
        seconds = {"wire_s": wire_ms / 1e3, "queued_s": queue_ms / 1e3, "executed_s": execute_ms / 1e3}
        attributes |= {f"paceline.{service}.{key}": value for key, value in seconds.items()}
        call = _span(f"{service}.call", trace_id, next(ids), round_id, start_ms, wire_ms + queue_ms + execute_ms)
        call = replace(call, kind="client")
        served = _span(f"{service}.call", trace_id, next(ids), call.span_id, start_ms + skew_ms, queue_ms + execute_ms)
        served = replace(served, kind="server", service=service, instance=service)
        work = _span("execute", trace_id, next(ids), served.span_id, start_ms + skew_ms + queue_ms, execute_ms)
        children += [call, served, replace(work, service=service, instance=service)]
    whole = _span("round", trace_id, 0, None, start_ms, end_ms - start_ms)
    yield replace(whole, span_id=round_id, attributes=attributes, links=(link,))
    yield from children


def _span(name: str, trace_id: str, number: int, parent: str | None, start_ms: int, duration_ms: int) -> SpanRecord:
    start_ns = start_ms * MILLISECOND_NS
    end_ns = start_ns + duration_ms * MILLISECOND_NS
    service = "paceline-coordinator"
    return SpanRecord(name, trace_id, f"{number:016x}", parent, "internal", service, "c", start_ns, end_ns)
