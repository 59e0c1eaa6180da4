"""What a round costs the coordinator itself: `python -m benchmarks.coordinator`.

The coordinator is the real process and every call crosses real gRPC, but the models answer at once: what is left is
grouping, codec, text, streams and gRPC.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated

import psutil
import typer
import uvloop
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.instant_models import instant_models
from benchmarks.processes import coordinator_process, cpu_s
from benchmarks.streams import Door, read_stream
from benchmarks.suffixes import suffixes
from paceline.client import Client
from paceline.process.service_process import Endpoint, running_service
from paceline.process.variables import NO_DRAFT
from paceline.types import GenerationRequest, Text

app = typer.Typer(add_completion=False, help=__doc__)
app.command()(suffixes)
console = Console(highlight=False)

HEADS_COUNT = "5"
"""Most tokens that the target's heads draft, where it has any and `auto` decides how many."""

DraftCount = Annotated[str, typer.Option(help="a number, or auto")]
HeadsDraft = Annotated[bool, typer.Option(help="the target's heads draft in place of a draft service")]
Read = Callable[[Sequence[GenerationRequest]], Awaitable[None]]
"""Sends requests, and reads their outputs."""


@app.command()
def rounds(
    batch_size: int = 8,
    draft_count: DraftCount = "5",
    runs: int = 5,
    max_new_tokens: int = 1000,
    door: Door = Door.TEXT,
    omit_text: bool = False,
    heads: HeadsDraft = False,
) -> None:
    """CPU milliseconds a round costs the coordinator's process, all its threads counted."""
    request = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, omit_text=omit_text)
    uvloop.run(_rounds(batch_size, draft_count, runs, request, door, heads))


async def _rounds(
    batch_size: int, draft_count: str, runs: int, request: GenerationRequest, door: Door, heads: bool
) -> None:
    async with _coordinator(batch_size, draft_count, heads=heads) as service, Client(service.address) as client:
        process = coordinator_process()
        read = partial(_by_calls, client) if door is Door.TEXT else partial(read_stream, service.address)
        for number in range(runs + 1):  # the first warms up
            spent = await _one_run(client, process, read, request, 2 * batch_size)
            if number:
                console.print(spent)


@asynccontextmanager
async def _coordinator(batch_size: int, draft_count: str, *flags: str, heads: bool = False) -> AsyncIterator[Endpoint]:
    """Run a coordinator over instant models."""
    heads_count = (draft_count if draft_count.isdecimal() else HEADS_COUNT) if heads else "0"
    async with instant_models("--heads-count", heads_count) as services:
        draft = NO_DRAFT if heads else services.drafts
        models = ["--draft", draft, "--target", services.targets, "--log-level", "error"]
        sizes = ["--batch-size", str(batch_size), "--draft-count", draft_count]
        async with running_service("coordinator", [*models, *sizes, *flags]) as service:
            yield service


@app.command()
def host(
    processes: int = 1,
    connections: int = 4,
    batch_size: int = 64,
    draft_count: DraftCount = "5",
    runs: int = 5,
    max_new_tokens: int = 500,
    omit_text: bool = False,
    heads: HeadsDraft = False,
) -> None:
    """Tokens/s that so many coordinator processes here give to gateways' streams; readers and models are here too."""
    request = GenerationRequest(Text("one two three"), max_new_tokens=max_new_tokens, omit_text=omit_text)
    uvloop.run(_host(processes, connections, batch_size, draft_count, runs, request, heads))


async def _host(
    processes: int,
    connections: int,
    batch_size: int,
    draft_count: str,
    runs: int,
    request: GenerationRequest,
    heads: bool,
) -> None:
    count = 2 * batch_size * processes
    async with _coordinator(batch_size, draft_count, "--processes", str(processes), heads=heads) as service:
        for number in range(runs + 1):  # the first warms up
            requests, began = [replace(request, seed=seed) for seed in range(count)], time.perf_counter()
            parts = [requests[first::connections] for first in range(connections)]
            await asyncio.gather(*(read_stream(service.address, one) for one in parts))
            if number:
                elapsed_s = time.perf_counter() - began
                console.print(f"{count * (request.max_new_tokens or 0) / elapsed_s:.0f} tokens/s")


async def _one_run(client: Client, process: psutil.Process, read: Read, request: GenerationRequest, count: int) -> str:
    before, cpu, began = (await client.describe()).statistics, cpu_s(process), time.perf_counter()
    await read([replace(request, seed=seed) for seed in range(count)])
    spent_s, elapsed_s = cpu_s(process) - cpu, time.perf_counter() - began
    after = (await client.describe()).statistics
    round_count = after.round_count - before.round_count
    return (
        f"{1e3 * spent_s / round_count:.2f} ms of CPU a round, {round_count} rounds, "
        f"{(after.committed_count - before.committed_count) / elapsed_s:.0f} tokens/s"
    )


async def _by_calls(client: Client, requests: Sequence[GenerationRequest]) -> None:
    await asyncio.gather(*(client.complete(one) for one in requests))


if __name__ == "__main__":
    run_command(app)
