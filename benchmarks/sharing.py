"""Several coordinators on one pair of models beside one with the same load: `python -m benchmarks.sharing`.

All coordinators are up at once, on one target and one draft service. In turn the large one alone and the small ones
together are kept busy, with as many requests as fill both of a coordinator's lanes. It prints tokens a second of both,
their ratio, the least and the largest share of a small one, how many calls the models served together, and what a token
costs each process.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.processes import cpu_s, latest_process
from benchmarks.scrapes import scraped
from paceline.cli.options import InputFile
from paceline.cli.prompts import selected_lines
from paceline.client import Client
from paceline.measure.contention import Contention, MachineWatch, counting, median_ratio, was_quiet
from paceline.measure.prompts import encode_lines, read_text_codec
from paceline.process.cluster_plan import ClusterOptions, divided_threads
from paceline.process.service_process import Endpoint, running_service
from paceline.types import GenerationRequest, TokenIds

LANES = 2
WARM_UP_S = 3.0
COORDINATOR = ("--prepared-rounds=false", "--port=0", "--log-level=warning")
"""Prepared rounds are left out: for a while each coordinator would try whether they pay."""
console = Console(highlight=False)


@dataclass(frozen=True)
class Window:
    """What coordinators did in some seconds."""

    rates: Sequence[float]
    """Tokens/s of each coordinator."""
    calls_together: Mapping[str, float]
    """Mean calls that a model served together, by `target` and `draft`."""
    cpu_us: Mapping[str, float]
    """Processor time of a token, in microseconds, in both models, all coordinators and the client."""
    contention: Contention

    @property
    def tokens_per_s(self) -> float:
        return sum(self.rates)


@dataclass(frozen=True)
class Size:
    batch_size: int
    lanes: int | None
    """None: as the coordinator chooses, of two."""
    draft_count: str
    """As a flag."""

    @property
    def row_count(self) -> int:
        return self.batch_size * (self.lanes or LANES)

    @property
    def flags(self) -> tuple[str, ...]:
        lanes = [f"--lanes={self.lanes}"] if self.lanes else []
        return f"--batch-size={self.batch_size}", *lanes, self.draft_count, *COORDINATOR


@dataclass(frozen=True)
class Model:
    process: psutil.Process
    metrics_url: str


class Coordinators:
    """Some coordinators with a client each, and the models behind them."""

    def __init__(
        self,
        clients: Sequence[Client],
        processes: Sequence[psutil.Process],
        row_count: int,
        models: Mapping[str, Model],
    ) -> None:
        """Each coordinator is to have so many requests at once."""
        self._clients = clients
        self._row_count = row_count
        self._models = models
        self._processes = {name: [one.process] for name, one in models.items()}
        self._processes |= {"coordinators": [*processes], "client": [psutil.Process()]}

    async def work(self, requests: Sequence[GenerationRequest], seconds: float, watch: MachineWatch) -> Window:
        """Keep all coordinators busy, and measure after a while."""
        left = cycle(requests)

        async def keep_asking(client: Client) -> None:
            while True:
                await client.complete(next(left))

        rows = range(self._row_count)
        asking = [asyncio.create_task(keep_asking(client)) for client in self._clients for _ in rows]
        try:
            await _pass(asking, WARM_UP_S)
            moment, began, counts, calls = watch.begin(), time.perf_counter(), await self._counts(), await self._calls()
            used_s = self._used_s()
            await _pass(asking, seconds)
            spent_s = {name: used - used_s[name] for name, used in self._used_s().items()}
            took_s, ended = time.perf_counter() - began, await self._counts()
            contention, later = watch.since(moment), await self._calls()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        rates = [(after - before) / took_s for before, after in zip(counts, ended, strict=True)]
        together = {name: _mean(calls[name], later[name]) for name in calls}
        spent_us = {name: round(1e6 * spent / took_s / sum(rates), 1) for name, spent in spent_s.items()}
        return Window(rates, together, spent_us, contention)

    def _used_s(self) -> dict[str, float]:
        return {name: sum(map(cpu_s, own)) for name, own in self._processes.items()}

    async def _counts(self) -> list[int]:
        described = await asyncio.gather(*(client.describe() for client in self._clients))
        return [one.statistics.committed_count for one in described]

    async def _calls(self) -> dict[str, tuple[float, float]]:
        """Return the calls of each model, and the turns in which they were served."""
        found = {}
        for name, model in self._models.items():
            samples = {one.name: one.value for one in await scraped(model.metrics_url)}
            found[name] = (
                samples.get("paceline_turn_calls_sum", 0.0),
                samples.get("paceline_turn_calls_count", 0.0),
            )
        return found


async def _pass(asking: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let requests be answered for a while. Raise the error of one that fails: nobody asks in its place."""
    failed, _ = await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in failed:
        one.result()


def _mean(before: tuple[float, float], after: tuple[float, float]) -> float:
    turns = after[1] - before[1]
    return round((after[0] - before[0]) / turns, 2) if turns else 1.0


def main(
    input_file: InputFile = None,
    count: Annotated[int, typer.Option(min=2, help="Small coordinators.")] = 4,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Of a small coordinator; the large one has all of theirs.")
    ] = 8,
    draft_count: str = "5",
    seconds: float = 15.0,
    runs: Annotated[int, typer.Option(min=1)] = 3,
    prompt_count: Annotated[int, typer.Option(min=1)] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    streams: Annotated[bool, typer.Option(help="One stream a coordinator, as a gateway has it.")] = False,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LANES,
            help="Of a small coordinator; with one, its groups are twice as large. Unset: as it chooses by itself.",
        ),
    ] = None,
    target_model: str = ClusterOptions.target_model,
    draft_model: str = ClusterOptions.draft_model,
    output: Annotated[Path | None, typer.Option(help="A file for all windows, as JSON.")] = None,
) -> None:
    """Print what several coordinators give beside one."""
    codec = read_text_codec(target_model, draft_model)
    lines = encode_lines(selected_lines(input_file, None, prompt_count), codec, chat=codec.has_chat_template)
    requests = [GenerationRequest(TokenIds(one.token_ids), max_new_tokens) for one in lines]
    small = Size(batch_size * LANES // (lanes or LANES), lanes, f"--draft-count={draft_count}")
    sizes = {"one": [replace(small, batch_size=count * batch_size, lanes=lanes and LANES)], "several": [small] * count}
    measured = asyncio.run(_measured(sizes, requests, seconds, runs, target_model, draft_model, streams))
    console.print_json(json.dumps(_summary(measured)))
    if output:
        windows = {name: [asdict(one) for one in found] for name, found in measured.items()}
        output.write_text(json.dumps(windows, indent=1), encoding="utf-8")


async def _measured(
    sizes: Mapping[str, Sequence["Size"]],
    requests: Sequence[GenerationRequest],
    seconds: float,
    runs: int,
    target_model: str,
    draft_model: str,
    streams: bool,
) -> dict[str, list[Window]]:
    async with AsyncExitStack() as stack:
        endpoints = await _models(stack, target_model, draft_model)
        models = {
            name: Model(latest_process(f"{name}_service"), one.metrics_url)
            for name, one in endpoints.items()
            if one.metrics_url
        }
        flags = [f"--{name}={one.address}" for name, one in endpoints.items()]
        systems = {}
        for name, own in sizes.items():
            clients, processes = [], []
            for size in own:
                endpoint = await stack.enter_async_context(running_service("coordinator", [*flags, *size.flags]))
                processes.append(latest_process("coordinator"))
                clients.append(await stack.enter_async_context(Client(endpoint.address, shares_stream=streams)))
            systems[name] = Coordinators(clients, processes, own[0].row_count, models)
        watch, windows = MachineWatch(), {name: list[Window]() for name in systems}
        for _ in range(runs):
            for name, system in systems.items():
                windows[name].append(await system.work(requests, seconds, watch))
        return windows


async def _models(stack: AsyncExitStack, target_model: str, draft_model: str) -> dict[str, Endpoint]:
    draft_threads, beside_draft = divided_threads(LANES)
    common = ("--port=0", "--metrics-port=0", "--prefix-sharing=false", "--log-level=warning")
    target = ("--model", target_model, f"--threads-beside-draft={beside_draft}", *common)
    draft = ("--model", draft_model, f"--threads={draft_threads}", *common)
    return {
        "target": await stack.enter_async_context(running_service("target_service", target)),
        "draft": await stack.enter_async_context(running_service("draft_service", draft)),
    }


def _summary(measured: Mapping[str, Sequence[Window]]) -> dict[str, object]:
    totals = {name: median(one.tokens_per_s for one in counting(windows)) for name, windows in measured.items()}
    several = counting(measured["several"])
    fair = [1 / len(one.rates) for one in several]
    shares = [[rate / one.tokens_per_s for rate in one.rates] for one in several]
    return {
        "tokens_per_s": {name: round(total) for name, total in totals.items()},
        "several_of_one": round(median_ratio(measured["several"], measured["one"]), 3),
        "shares_of_fair": [
            [round(share / one, 3) for share in (min(own), max(own))] for own, one in zip(shares, fair, strict=True)
        ],
        "calls_together": {name: [one.calls_together for one in windows] for name, windows in measured.items()},
        "cpu_us_per_token": {name: [one.cpu_us for one in own] for name, own in measured.items()},
        "quiet": {name: f"{sum(map(was_quiet, own))} of {len(own)}" for name, own in measured.items()},
    }


if __name__ == "__main__":
    run_command(main)
