"""How far one coordinator and one host go: `python -m benchmarks.scale`.

The coordinator and its clients are real, and every call crosses real gRPC. Model services compute nothing: they answer
after the times that were measured, or that are given. So a few cores stand for many devices, and what is left is what
the coordinator and its clients cost.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from benchmarks.processes import coordinator_process, cpu_s, tree_cpu_s
from benchmarks.timed_services import CostsFile, DraftTime, VerifyTime, timed_services
from paceline.client import Client
from paceline.measure.load.load import LoadLog, run_loops
from paceline.measure.load.summary import LoadSummary, Objectives, summarize
from paceline.process.service_process import running_service
from paceline.types import ClusterStatistics, GenerationRequest, Text

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False, width=170)
LANES = 2
REQUESTS_A_STREAM = 3


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
    clients_s: float
    memory_bytes: int
    """Memory of the coordinator while all streams ran."""

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
            f"{self.clients_s / elapsed_s:.2f}",
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
    "clients",
    "CPU a round",
    "tokens/s a core",
    "memory",
)


@app.command()
def scale(
    targets: str = "1,2,4",
    batch_size: int = 8,
    draft_count: int = 5,
    max_new_tokens: int = 256,
    costs: CostsFile = None,
    verify_ms: VerifyTime = 20.0,
    draft_ms: DraftTime = 8.0,
    drafts: int | None = None,
) -> None:
    """Keep so many targets busy with two groups each; `--drafts` is as many as targets where it is not given."""
    times = ["--costs", str(costs)] if costs else ["--verify-ms", str(verify_ms), "--draft-ms", str(draft_ms)]
    table = Table(*COLUMNS)
    for count in map(int, targets.split(",")):
        flags = [str(count), str(drafts or count), *times]
        asked = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, max_draft_count=draft_count)
        table.add_row(*uvloop.run(_driven(count, batch_size, asked, flags)).row)
    console.print(table)


async def _driven(target_count: int, batch_size: int, asked: GenerationRequest, flags: Sequence[str]) -> Driven:
    async with timed_services(*flags) as models:
        own = [*models.flags, "--log-level", "error"]
        own += ["--batch-size", str(batch_size), "--lanes", str(LANES), "--draft-count", str(asked.max_draft_count)]
        async with running_service("coordinator", own) as service, Client(service.address) as client:
            streams = LANES * batch_size * target_count
            await asyncio.gather(*(client.complete(asked) for _ in range(streams)))  # all begins slowly
            return await _measured(client, coordinator_process(), models.process, asked, target_count, streams)


async def _measured(
    client: Client,
    coordinator: psutil.Process,
    services: psutil.Process,
    asked: GenerationRequest,
    target_count: int,
    streams: int,
) -> Driven:
    log, processes = LoadLog(), (coordinator, services)
    before, used_s, own_s = await _statistics(client), [tree_cpu_s(one) for one in processes], cpu_s(psutil.Process())
    load = asyncio.create_task(run_loops([asked] * streams * REQUESTS_A_STREAM, streams, client.generate, log))
    await asyncio.sleep(1.0)
    memory_bytes = coordinator.memory_info().rss
    await load
    coordinator_s, services_s = (tree_cpu_s(one) - was for one, was in zip(processes, used_s, strict=True))
    clients_s = cpu_s(psutil.Process()) - own_s
    rounds = (await _statistics(client)).round_count - before.round_count
    summary = summarize(log.records, Objectives())
    return Driven(target_count, streams, summary, rounds, coordinator_s, services_s, clients_s, memory_bytes)


async def _statistics(client: Client) -> ClusterStatistics:
    return (await client.describe()).statistics


if __name__ == "__main__":
    run_command(app)
