"""The result of a soak as a table, as JSON, and as a verdict."""

from collections import Counter
from dataclasses import asdict

from rich.table import Table

from benchmarks.soak.clients import Failure
from benchmarks.soak.run import Result
from benchmarks.soak.samples import broken_requests, growth, peaks

AFTERMATH_S = 30.0
"""Seconds after a fault for which it is still to blame, because connections come back with delay."""
SHOWN = 5


def untolerated(result: Result) -> list[Failure]:
    """Return the failures that no tolerated fault explains."""
    blamed = [fault for fault in result.faults if fault.kind in result.plan.tolerated]
    return [
        failure
        for failure in result.tally.failures
        if not any(
            failure.began_s <= fault.ended_s + AFTERMATH_S and fault.began_s <= failure.ended_s for fault in blamed
        )
    ]


def is_sound(result: Result) -> bool:
    wrong = untolerated(result) or result.tally.mismatches or result.leaks or result.exceeding
    return not wrong and result.tally.request_count > 0


def summary(result: Result) -> dict[str, object]:
    tally = result.tally
    return {
        "plan": asdict(result.plan),
        "requests": tally.request_count,
        "right_by_way": dict(tally.ended),
        "right_by_kind": dict(tally.kinds),
        "tokens_compared": tally.token_count,
        "broken_streams": broken_requests(result.samples),
        "faults": _counts(result),
        "mismatches": tally.mismatches,
        "failures": [asdict(one) for one in tally.failures],
        "failures_untolerated": len(untolerated(result)),
        "leaks": result.leaks,
        "exceeding": result.exceeding,
        "rss_bytes": {name: {"first": first, "last": last} for name, (first, last) in growth(result.calm).items()},
        "samples": [asdict(one) for one in result.samples],
        "fault_times": [asdict(one) for one in result.faults],
    }


def _counts(result: Result) -> dict[str, int]:
    return dict(sorted(Counter(fault.kind for fault in result.faults).items()))


def table(result: Result) -> Table:
    tally = result.tally
    shown = Table(
        "", "", title=f"{result.plan.duration_s:.0f} s, {result.plan.client_count} clients", show_header=False
    )
    rows: list[tuple[str, object]] = [("requests", tally.request_count)]
    rows += [(f"  {way}", count) for way, count in sorted(tally.ended.items())]
    rows.append(("  failed by the coordinator, most taken up again", broken_requests(result.samples)))
    rows.append(("tokens compared", tally.token_count))
    rows += [("faults", len(result.faults)), *((f"  {kind}", count) for kind, count in _counts(result).items())]
    rows += [("mismatches", len(tally.mismatches)), ("failures", len(tally.failures))]
    if result.plan.tolerated:
        rows.append(("  that no tolerated fault explains", len(untolerated(result))))
    rows.append(("leaks", len(result.leaks)))
    for name, (first, last) in growth(result.calm).items():
        rows.append((f"  memory of {name}, first and last", f"{first >> 20} and {last >> 20} MiB"))
    rows.append(("over their memory", len(result.exceeding)))
    rows += [(f"  most of {name}", f"{peak >> 20} MiB") for name, peak in peaks(result.samples).items()]
    for name, value in rows:
        shown.add_row(name, str(value))
    return shown


def problems(result: Result) -> list[str]:
    """Return the first few problems of each kind, one line each."""
    failures = [f"failed: {one.asked}: {one.reason}: {one.message}" for one in untolerated(result)]
    return [*result.tally.mismatches[:SHOWN], *failures[:SHOWN], *result.leaks[:SHOWN], *result.exceeding[:SHOWN]]
