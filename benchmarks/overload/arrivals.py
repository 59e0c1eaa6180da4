"""Arrivals at five times the rate that the cluster can serve.

The capacity is measured first, with just enough clients to keep the cluster busy. Then requests arrive at five times
that rate. A refused request must get RESOURCE_EXHAUSTED with RetryInfo. Any other must get the right tokens, within a
time that does not depend on the number of refusals: the time to serve a full queue and the slowest request at capacity.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from google.rpc import error_details_pb2
from grpc_status import rpc_status

from benchmarks.soak.cluster import SoakOptions, running_processes
from benchmarks.soak.requests import Asked, make_requests, with_references
from paceline.client import NO_RETRIES, Client
from paceline.errors import Overloaded
from paceline.measure.load.arrivals import poisson_arrivals
from paceline.measure.load.load import LoadLog, Outcome, run_load
from paceline.measure.load.summary import percentile
from paceline.types import GenerationRequest, OutputPiece

SLACK = 2.0
"""Factor on the latency bound, because the machine may be slower now than when it was measured."""


@dataclass
class Watched:
    """Requests for `run_load` that compare each output with its reference."""

    client: Client
    asked: Sequence[Asked]
    refusals: Counter[str] = field(default_factory=Counter)
    """Number of refusals with and without RetryInfo."""
    mismatch_count: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[OutputPiece]:
        outputs: dict[int, list[int]] = {}
        try:
            async for piece in self.client.generate(request):
                outputs.setdefault(piece.completion_index, []).extend(one.token_id for one in piece.tokens)
                yield piece
        except Overloaded as refusal:
            self.refusals["RetryInfo" if has_retry_info(refusal) else "no RetryInfo"] += 1
            raise
        (expected,) = (one.outputs for one in self.asked if one.request is request)
        self.mismatch_count += [tuple(outputs[index]) for index in sorted(outputs)] != list(expected)


def has_retry_info(refusal: Overloaded) -> bool:
    """Return whether the status has RetryInfo; the error itself has a retry time even without."""
    call: Any = refusal.__cause__
    status = rpc_status.from_call(call)
    return status is not None and any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)


@dataclass(frozen=True)
class Capacity:
    per_s: float
    """Answered requests a second."""
    slowest_s: float


async def measure(times: float, duration_s: float, queue_limit: int, seed: int) -> dict[str, Any]:
    options = SoakOptions(kv_memory="256MiB", coordinator_flags=("--queue-limit", str(queue_limit)))
    async with (
        running_processes(options) as cluster,
        Client(cluster.coordinator.endpoint.address, NO_RETRIES) as client,
    ):
        # Each request has one output, so that it takes one place in the queue.
        requests = [one for one in make_requests(48, seed) if one[1].completion_count == 1]
        asked = await with_references(client, requests)
        described = await client.describe()
        capacity = await measure_capacity(client, asked, described.batch_size * described.lane_count, duration_s)
        watched, log = Watched(client, asked), LoadLog()
        arrivals = poisson_arrivals(times * capacity.per_s, seed, duration_s=duration_s)
        await run_load(zip(arrivals, cycle(one.request for one in asked)), watched.generate, log)
        described = await client.describe()
    left_count = described.live_sequence_count + described.waiting_sequence_count
    return summary(capacity, times, queue_limit, watched, log) | {"left_in_the_pool": left_count}


def summary(capacity: Capacity, times: float, queue_limit: int, watched: Watched, log: LoadLog) -> dict[str, Any]:
    completed = [record for record in log.records if record.outcome is Outcome.COMPLETED]
    latencies = [record.latency_s for record in completed]
    served_per_s = len(completed) / max(record.ended_s for record in completed)
    return {
        "capacity_per_s": round(capacity.per_s, 2),
        "slowest_at_capacity_s": round(capacity.slowest_s, 2),
        "arrivals_per_s": round(times * capacity.per_s, 2),
        "served_per_s": round(served_per_s, 2),
        "requests": len(log.records),
        "completed": len(completed),
        "rejected_with_retry_info": watched.refusals["RetryInfo"],
        "rejected_without": watched.refusals["no RetryInfo"],
        "failed": log.count(Outcome.FAILED),
        "mismatches": watched.mismatch_count,
        "latency_p50_s": round(percentile(latencies, 50), 2),
        "latency_p99_s": round(percentile(latencies, 99), 2),
        "latency_max_s": round(max(latencies), 2),
        # By what was served at capacity: with the rate of now the bound would grow with the latencies that it bounds.
        "latency_bound_s": round(SLACK * ((queue_limit + 1) / capacity.per_s + capacity.slowest_s), 2),
    }


async def measure_capacity(client: Client, asked: Sequence[Asked], client_count: int, duration_s: float) -> Capacity:
    """Let `client_count` clients ask, each again as soon as it has its answer."""
    began, latencies = time.perf_counter(), list[float]()
    waiting = cycle(asked)

    async def ask_on() -> None:
        while (asked_s := time.perf_counter()) - began < duration_s:
            await client.complete(next(waiting).request)
            latencies.append(time.perf_counter() - asked_s)

    await asyncio.gather(*(ask_on() for _ in range(client_count)))
    return Capacity(len(latencies) / (time.perf_counter() - began), max(latencies))


def is_sound(result: dict[str, Any]) -> bool:
    nothing = ("rejected_without", "failed", "mismatches", "left_in_the_pool")
    return (
        not any(result[name] for name in nothing)
        and result["completed"] + result["rejected_with_retry_info"] == result["requests"]
        and result["rejected_with_retry_info"] > 0
        and result["latency_max_s"] <= result["latency_bound_s"]
    )
