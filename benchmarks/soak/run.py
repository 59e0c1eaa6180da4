"""One soak: references first, then load with faults, then load in calm, then rest."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.soak.clients import Soaker, Tally
from benchmarks.soak.cluster import ProcessCluster, SoakOptions, running_processes
from benchmarks.soak.faults import KINDS, Fault, Faults
from benchmarks.soak.requests import make_requests, with_references
from benchmarks.soak.samples import Sample, exceeding, keep_sampling, leaks, left_behind, sample_all
from paceline.client import Client

SAMPLE_EVERY_S = 1.0
SETTLE_S = 60.0
"""Seconds to settle, on top of the sequences' time to live."""


@dataclass(frozen=True)
class Plan:
    duration_s: float = 1200.0
    calm_share: float = 0.25
    """Share of the duration, at its end, without faults. Memory is judged there, because a new process starts small."""
    client_count: int = 6
    request_count: int = 48
    """Number of different requests."""
    faults: tuple[str, ...] = KINDS
    gap_s: tuple[float, float] = (1.0, 6.0)
    tolerated: tuple[str, ...] = ()
    """Faults that may fail the requests in flight."""
    resume: bool = True
    """Whether clients take broken streams up again."""
    seed: int = 1


@dataclass(frozen=True)
class Result:
    plan: Plan
    tally: Tally
    faults: list[Fault]
    samples: list[Sample]
    calm: list[Sample]
    leaks: list[str] = field(default_factory=list)
    exceeding: list[str] = field(default_factory=list)
    """Members that took more than their memory."""


Connect = Callable[[str], Client]
"""Opens a client of the coordinator at an address."""


async def soak(options: SoakOptions, plan: Plan, connect: Connect) -> Result:
    async with running_processes(options) as cluster, connect(cluster.coordinator.endpoint.address) as client:
        # Sampled before the first request: an idle cluster has to have this much.
        idle = await _settled(cluster, None, time.perf_counter(), options.sequence_ttl_s)
        asked = await with_references(client, make_requests(plan.request_count, plan.seed))
        began_s = time.perf_counter()
        soaker = Soaker(client, asked, seed=plan.seed, began_s=began_s)
        faults = Faults(cluster, plan.faults, gap_s=plan.gap_s, seed=plan.seed, began_s=began_s)
        samples: list[Sample] = []
        calm_from_s = await _load(cluster, soaker, faults, samples, plan, began_s)
        after = await _settled(cluster, idle, began_s, options.sequence_ttl_s)
        calm = [one for one in samples if one.at_s >= calm_from_s]
        over = exceeding([*samples, *after], options.memory_bytes)
        return Result(plan, soaker.tally, faults.done, samples, calm, leaks(calm, idle, after), over)


async def _load(
    cluster: ProcessCluster, soaker: Soaker, faults: Faults, samples: list[Sample], plan: Plan, began_s: float
) -> float:
    """Run clients, faults and sampling for the plan's time; return when the faults ended, on the soak's clock."""
    calm_s = plan.duration_s * plan.calm_share
    calm, ended = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(keep_sampling(cluster, began_s, SAMPLE_EVERY_S, samples))
        clients = group.create_task(soaker.run(plan.client_count, ended))
        disturbing = group.create_task(faults.run(calm))
        await asyncio.sleep(plan.duration_s - calm_s)
        calm.set()
        await disturbing
        calm_from_s = time.perf_counter() - began_s
        await asyncio.sleep(calm_s)
        ended.set()
        await clients
        sampling.cancel()
    return calm_from_s


async def _settled(
    cluster: ProcessCluster, idle: list[Sample] | None, began_s: float, sequence_ttl_s: float
) -> list[Sample]:
    """Return samples of the idle cluster once nothing is left behind, or when that takes too long.

    Without `idle` samples to compare with, wait for three equal ones in a row.
    """
    ends_at_s = time.perf_counter() + sequence_ttl_s + SETTLE_S
    last: list[list[tuple[int, int]]] = []
    while True:
        found = await sample_all(cluster, began_s)
        last.append([(one.tasks, one.sequences) for one in found])
        if idle is None:
            settled = len(last) >= 3 and last[-1] == last[-2] == last[-3]
        else:
            settled = not [one for before, after in zip(idle, found, strict=True) for one in left_behind(before, after)]
        if settled or time.perf_counter() >= ends_at_s:
            return found
        await asyncio.sleep(1)
