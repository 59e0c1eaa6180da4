"""Samples of what could leak or take too much: memory, open files, tasks, sequences."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from statistics import median

from prometheus_client.samples import Sample as MetricSample

from benchmarks.resident import Resident
from benchmarks.scrapes import scraped
from benchmarks.soak.cluster import Member, ProcessCluster, role_of

GROWTH_SHARE = 0.05
GROWTH_BYTES = 24 << 20
"""Allowed growth of memory while nothing is killed; allocators keep what a busy moment took."""


AWAY = (OSError, HTTPException, KeyError)
"""Errors of a scrape when the service is down, dies meanwhile, or starts and lacks some metrics."""
BROKEN_CODES = ("UNAVAILABLE", "INTERNAL")
MORE_FILES = 8
"""Allowance for connections that come and go with clients and scrapes."""


@dataclass(frozen=True)
class Sample:
    member: str
    at_s: float
    """Time on the soak's clock."""
    rss_bytes: int
    open_files: int
    tasks: int
    sequences: int
    """Sequences cached in a model service, or generations running and waiting in the coordinator."""
    broken_requests: int = 0
    """Requests that the coordinator ended with UNAVAILABLE or INTERNAL since it started."""
    peak_bytes: int = 0
    """Most that its process ever had resident."""


async def sample(member: Member, began_s: float) -> Sample:
    """Read one service's metrics, and its peak. Raise OSError when it is away."""
    at_s = time.perf_counter() - began_s
    values = _summed(await scraped(member.endpoint.metrics_url or ""))
    names = ("sequences_running", "sequences_waiting") if member.role == "coordinator" else ("kv_sequences",)
    return Sample(
        member.name,
        at_s,
        int(values["process_resident_memory_bytes"]),
        int(values["process_open_fds"]),
        int(values["paceline_tasks"]),
        int(sum(values[f"paceline_{name}"] for name in names)),
        int(values.get("paceline_requests_total", 0)),
        Resident(member.process.pid).peak(),
    )


def _summed(samples: Iterable[MetricSample]) -> Mapping[str, float]:
    """Return values by name, summed over labels; of values by status only those of broken requests."""
    values: defaultdict[str, float] = defaultdict(float)
    for one in samples:
        if one.labels.get("code", BROKEN_CODES[0]) in BROKEN_CODES:
            values[one.name] += one.value
    return dict(values)


def broken_requests(samples: Iterable[Sample]) -> int:
    """Count the requests that coordinators ended with a failure of the cluster; a falling count means a new process."""
    counts = [0, *(one.broken_requests for one in samples if one.member == "coordinator")]
    return sum(after - before if after >= before else after for before, after in pairwise(counts))


async def sample_all(cluster: ProcessCluster, began_s: float) -> list[Sample]:
    return list(await asyncio.gather(*(sample(member, began_s) for member in cluster.members)))


async def keep_sampling(cluster: ProcessCluster, began_s: float, every_s: float, samples: list[Sample]) -> None:
    """Add samples of the running services until cancelled; a service that is down or paused has none."""
    while True:
        found = await asyncio.gather(*(sample(member, began_s) for member in cluster.members), return_exceptions=True)
        samples += [one for one in found if isinstance(one, Sample)]
        if unexpected := [one for one in found if not isinstance(one, (Sample, *AWAY))]:
            raise unexpected[0]
        await asyncio.sleep(every_s)


def growth(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Return each member's median resident bytes in the second and the last third of samples; the first warms up."""
    found: dict[str, tuple[int, int]] = {}
    for name in sorted({one.member for one in samples}):
        own = [one.rss_bytes for one in samples if one.member == name]
        third = len(own) // 3
        if third:
            found[name] = (int(median(own[third : 2 * third])), int(median(own[2 * third :])))
    return found


def peaks(samples: Iterable[Sample]) -> dict[str, int]:
    """Return the most bytes that any process of each member took."""
    found: dict[str, int] = {}
    for one in samples:
        found[one.member] = max(one.peak_bytes, found.get(one.member, 0))
    return found


def exceeding(samples: Iterable[Sample], memory_bytes: Mapping[str, int]) -> list[str]:
    """Return a line for each member that took more than its role was given."""
    return [
        f"{name}: took {peak >> 20} MiB of {most >> 20}"
        for name, peak in peaks(samples).items()
        if peak > (most := memory_bytes.get(role_of(name), peak))
    ]


def leaks(calm: Sequence[Sample], idle_before: Iterable[Sample], idle_after: Iterable[Sample]) -> list[str]:
    """Return a line for each member whose memory grew in calm beyond both bounds together, and for all left behind."""
    before = {one.member: one for one in idle_before}
    found = [
        f"{name}: memory grew from {first >> 20} to {last >> 20} MiB"
        for name, (first, last) in growth(calm).items()
        if last > first * (1 + GROWTH_SHARE) + GROWTH_BYTES
    ]
    return found + [one for after in idle_after for one in left_behind(before[after.member], after)]


def left_behind(before: Sample, after: Sample) -> list[str]:
    """Return a line for each count of which an idle service has more than at the start."""
    counts = [("sequences", 0, after.sequences), ("tasks", before.tasks, after.tasks)]
    counts.append(("open files", before.open_files + MORE_FILES, after.open_files))
    return [f"{after.member}: {now} {what}, {most} at most" for what, most, now in counts if now > most]
