"""How far a coordinator process and a host go: `python -m benchmarks.scale`.

The coordinator and its callers are real, and every call crosses real gRPC. Model services compute nothing: they answer
after the times that were measured, or that are given. So a few cores stand for many devices, and what is left is what
the coordinator and its callers cost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from benchmarks.processes import coordinator_process, cpu_s, tree_cpu_s
from benchmarks.scrapes import scraped
from benchmarks.streams import Door, stream_messages
from benchmarks.timed_services import CostsFile, DraftTime, VerifyTime, timed_services
from paceline.client import Client
from paceline.measure.load.load import LoadLog, Outcome, SentRequest, run_loops
from paceline.measure.load.summary import LoadSummary, Objectives, summarize
from paceline.process.service_process import Endpoint, running_service
from paceline.types import GenerationRequest, Text

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False, width=170)
LANES = 2
REQUESTS_A_STREAM = 3
Drive = Callable[[Sequence[GenerationRequest], LoadLog], Awaitable[None]]
"""Sends requests, so many at once, and logs their outputs."""


@dataclass(frozen=True)
class Driven:
    """What a coordinator did, and what it and the others used meanwhile."""

    targets: int
    streams: int
    summary: LoadSummary
    rounds: int
    coordinator_s: float
    """CPU seconds of all its processes."""
    services_s: float
    callers_s: float
    memory_bytes: int
    """Memory of all its processes while all streams ran."""

    @property
    def row(self) -> list[str]:
        elapsed_s, latency = self.summary.elapsed_s, self.summary.per_token_s
        assert latency
        cores = self.coordinator_s / elapsed_s
        return [
            str(self.targets),
            str(self.streams),
            f"{self.summary.tokens_per_s:.0f}",
            f"{self.rounds / elapsed_s:.0f}",
            f"{1e3 * latency.p50:.1f} / {1e3 * latency.p99:.1f} ms",
            f"{cores:.2f}",
            f"{self.services_s / elapsed_s:.2f}",
            f"{self.callers_s / elapsed_s:.2f}",
            f"{1e3 * self.coordinator_s / self.rounds:.2f} ms",
            f"{self.summary.tokens_per_s / cores:.0f}",
            f"{self.memory_bytes / 2**20:.0f} MiB",
        ]


COLUMNS = (
    "targets",
    "streams",
    "tokens/s",
    "rounds/s",
    "per token P50 / P99",
    "cores: coordinator",
    "services",
    "callers",
    "CPU a round",
    "tokens/s a core",
    "memory",
)


@dataclass(frozen=True)
class Driving:
    """What is asked, and by whom."""

    asked: GenerationRequest
    batch_size: int
    door: Door
    processes: int
    connections: int

    def streams(self, target_count: int) -> int:
        """As many as the places that all processes have."""
        return LANES * self.batch_size * target_count * self.processes

    @property
    def flags(self) -> list[str]:
        own = ["--log-level", "error", "--metrics-port", "0", "--processes", str(self.processes)]
        own += ["--batch-size", str(self.batch_size), "--lanes", str(LANES)]
        return [*own, "--draft-count", str(self.asked.max_draft_count)]


@app.command()
def scale(
    targets: str = "1,2,4",
    batch_size: int = 8,
    draft_count: int = 5,
    max_new_tokens: int = 256,
    door: Door = Door.TEXT,
    processes: int = 1,
    connections: int = 16,
    costs: CostsFile = None,
    verify_ms: VerifyTime = 20.0,
    draft_ms: DraftTime = 8.0,
    drafts: int | None = None,
) -> None:
    """Keep so many targets busy with two groups of each process; `--drafts` is as many as targets unless given.

    `--connections` is how many streams of `--door stream` the requests go over.
    """
    if processes > 1 and door is Door.TEXT:
        raise typer.BadParameter(
            f"--processes {processes} needs --door stream: all calls of --door text share a connection, so a process"
        )
    times = ["--costs", str(costs)] if costs else ["--verify-ms", str(verify_ms), "--draft-ms", str(draft_ms)]
    asked = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, max_draft_count=draft_count)
    driving = Driving(asked, batch_size, door, processes, connections)
    table = Table(*COLUMNS)
    for count in map(int, targets.split(",")):
        flags = [str(count), str(drafts or count), *times]
        table.add_row(*uvloop.run(_driven(count, driving, flags)).row)
    console.print(table)


async def _driven(target_count: int, driving: Driving, flags: Sequence[str]) -> Driven:
    async with (
        timed_services(*flags) as models,
        running_service("coordinator", [*models.flags, *driving.flags]) as service,
    ):
        streams = driving.streams(target_count)
        if driving.door is Door.TEXT:
            drive: Drive = partial(_by_calls, service.address, streams)
        else:
            drive = partial(_by_streams, service.address, streams, driving.connections)
        await drive([driving.asked] * streams, LoadLog())  # all begins slowly
        requests = [driving.asked] * streams * REQUESTS_A_STREAM
        return await _measured(drive, requests, service, models.process, target_count, streams)


async def _by_calls(address: str, streams: int, requests: Sequence[GenerationRequest], log: LoadLog) -> None:
    async with Client(address) as client:
        await run_loops(requests, streams, client.generate, log)


async def _by_streams(
    address: str, streams: int, connections: int, requests: Sequence[GenerationRequest], log: LoadLog
) -> None:
    log.began_s, left = log.clock(), iter(requests)
    counts = [len(range(first, streams, connections)) for first in range(min(connections, streams))]
    await asyncio.gather(*(_read(address, left, count, log) for count in counts))


async def _read(address: str, requests: Iterator[GenerationRequest], at_once: int, log: LoadLog) -> None:
    """Log when the tokens of a stream's calls came. A call begins with its first update."""
    began_s: dict[int, float] = {}
    token_times: dict[int, list[tuple[float, int]]] = {}
    async for message in stream_messages(address, requests, at_once):
        now_s = log.elapsed_s()
        for update in message.updates:
            began = began_s.setdefault(update.call_id, now_s)
            own = token_times.setdefault(update.call_id, [])
            if count := sum(len(run.token_ids) for run in update.response.runs):
                own.append((now_s, count))
            if update.HasField("ended"):
                log.records.append(SentRequest(began, began, now_s, Outcome.COMPLETED, tuple(own)))


async def _measured(
    drive: Drive,
    requests: Sequence[GenerationRequest],
    service: Endpoint,
    services: psutil.Process,
    target_count: int,
    streams: int,
) -> Driven:
    log, coordinator = LoadLog(), coordinator_process()
    processes = (coordinator, services)
    before, used_s, own_s = await _rounds(service), [tree_cpu_s(one) for one in processes], cpu_s(psutil.Process())
    load = asyncio.ensure_future(drive(requests, log))
    await asyncio.sleep(1.0)
    memory_bytes = sum(one.memory_info().rss for one in (coordinator, *coordinator.children(recursive=True)))
    await load
    coordinator_s, services_s = (tree_cpu_s(one) - was for one, was in zip(processes, used_s, strict=True))
    callers_s = cpu_s(psutil.Process()) - own_s
    summary, rounds = summarize(log.records, Objectives()), await _rounds(service) - before
    return Driven(target_count, streams, summary, rounds, coordinator_s, services_s, callers_s, memory_bytes)


async def _rounds(service: Endpoint) -> int:
    """Return the rounds that all processes have run."""
    samples = [one for url in service.metrics_urls for one in await scraped(url)]
    return sum(int(one.value) for one in samples if one.name == "paceline_rounds_total")


if __name__ == "__main__":
    run_command(app)
