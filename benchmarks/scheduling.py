"""Policies and lanes against each other: `python -m benchmarks.scheduling --data train.jsonl`.

Every system is a cluster of its own on the built-in pair; they run alternately over the same unseen problems, and
medians are shown. `load` sends Poisson arrivals instead, at a share of what the slowest system can serve.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.processes import coordinator_process, cpu_s
from benchmarks.questions import Gsm8kFile, encode_questions
from paceline.client import Client, Completion
from paceline.measure.alternate import equal_count, median_tokens_per_s, timed_passes
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import MachineWatch, was_quiet
from paceline.measure.load.arrivals import poisson_arrivals
from paceline.measure.load.load import LoadLog, run_load
from paceline.measure.load.summary import Objectives, summarize
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import Addresses, running_cluster
from paceline.types import ClusterStatistics, GenerationRequest, TokenIds, UserMessage
from training import problems

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False)

SYSTEMS = {
    "continuous, 2 lanes": ClusterOptions(),
    "continuous, 1 lane": ClusterOptions(lanes=1),
    "continuous, auto": ClusterOptions(draft_count="auto"),
    "exspec, dense": ClusterOptions(policy="exspec", layout="dense"),
    "eqspec, dense": ClusterOptions(policy="eqspec", layout="dense"),
}
PAPER_GROUPED = {2: (0.959, 0.236), 4: (0.893, 0.175), 8: (0.841, 0.048), 16: (0.707, 0.013), 32: (0.442, 0.0)}
"""Grouping rates of arXiv 2510.22876, figure 5c: prompts of equal and of random lengths, by batch size."""


@app.command()
def policies(data: Gsm8kFile, problem_count: int = 64, runs: int = 3, max_new_tokens: int = 160) -> None:
    """Throughput, occupancy and grouping of each policy and lane count. Exit status 1 when an output differs."""
    rows = asyncio.run(throughput(SYSTEMS, _questions(data, problem_count), runs, max_new_tokens))
    raise typer.Exit(int(not all(row["outputs_equal"] for row in rows)))


@app.command()
def load(data: Gsm8kFile, problem_count: int = 96, share: float = 0.7, max_new_tokens: int = 160) -> None:
    """Latency under Poisson arrivals, one system after the other, each with the same arrivals."""
    systems = {name: SYSTEMS[name] for name in ("eqspec, dense", "exspec, dense", "continuous, 2 lanes")}
    asyncio.run(_latency(systems, _questions(data, problem_count), share, max_new_tokens))


@app.command()
def grouping(prompt_count: int = 100, max_new_tokens: int = 50) -> None:
    """Share of exspec's rounds that found a group of equal lengths, beside the paper's figure 5c."""
    asyncio.run(_grouping(prompt_count, max_new_tokens))


def _questions(data: Path, count: int) -> list[str]:
    _, unseen = problems.load(data)
    return [problem.question for problem in unseen[:count]]


async def throughput(
    systems: Mapping[str, ClusterOptions], questions: Sequence[str], runs: int, max_new_tokens: int
) -> list[dict[str, object]]:
    """Return a row of figures for each system; print it as it comes."""
    rows = list[dict[str, object]]()
    async with AsyncExitStack() as stack:
        clusters, coordinators = await _clusters(stack, systems)
        sent = {name: ClusterSystem(*cluster, max_new_tokens) for name, cluster in clusters.items()}
        prompts = encode_questions(questions, next(iter(systems.values())))
        before_s = {name: cpu_s(process) for name, process in coordinators.items()}
        measured = await timed_passes(sent, prompts, runs, MachineWatch())
        first = next(iter(measured.values()))[0].outputs
        for name, (client, _) in clusters.items():
            # The counters cover all since the start, so the processor time does too: warm-ups and disturbed passes.
            statistics = (await client.describe()).statistics
            spent_s = cpu_s(coordinators[name]) - before_s[name]
            row = row_of(name, measured[name], statistics, first)
            row["coordinator_cpu_ms_per_round"] = round(1e3 * spent_s / statistics.round_count, 2)
            console.print_json(json.dumps(row))
            rows.append(row)
    return rows


async def _clusters(
    stack: AsyncExitStack, systems: Mapping[str, ClusterOptions]
) -> tuple[dict[str, tuple[Client, Addresses]], dict[str, psutil.Process]]:
    """Start the clusters; return of each a client with the addresses, and the coordinator's process."""
    clusters, coordinators = {}, {}
    for name, options in systems.items():
        addresses = await stack.enter_async_context(running_cluster(replace(options, prefix_sharing=False)))
        clusters[name] = (await stack.enter_async_context(Client(addresses.coordinator)), addresses)
        coordinators[name] = coordinator_process()
    return clusters, coordinators


def row_of(
    name: str, runs: Sequence[Measured], counted: ClusterStatistics, expected: Sequence[Sequence[int]]
) -> dict[str, object]:
    rows = sum(size * count for size, count in counted.round_counts_by_group_size)
    return {
        "system": name,
        "tokens_per_s": round(median_tokens_per_s(runs)),
        "quiet_runs": sum(map(was_quiet, runs)),
        "tokens_per_row": round(counted.committed_count / rows, 2),
        "acceptance": round(counted.accepted_count / counted.drafted_count, 3) if counted.drafted_count else None,
        "occupancy_while_waiting": round(counted.occupancy_while_waiting, 3),
        "grouped_rounds": round(1 - counted.fallback_round_count / counted.round_count, 3),
        "outputs_equal": equal_count(runs, expected) == len(expected),
    }


async def _answer(client: Client, question: str, max_new_tokens: int) -> Completion:
    return await client.complete(_request(question, max_new_tokens))


def _request(question: str, max_new_tokens: int) -> GenerationRequest:
    return GenerationRequest(UserMessage(question), max_new_tokens=max_new_tokens)


async def _latency(
    systems: Mapping[str, ClusterOptions], questions: Sequence[str], share: float, max_new_tokens: int
) -> None:
    async with AsyncExitStack() as stack:
        clusters, _ = await _clusters(stack, systems)
        clients = {name: client for name, (client, _) in clusters.items()}
        # The slowest system's own throughput sets the load, so that none is overloaded.
        slowest = next(iter(clients.values()))
        for _ in range(2):
            began = time.perf_counter()
            await asyncio.gather(*(_answer(slowest, one, max_new_tokens) for one in questions))
            per_s = len(questions) / (time.perf_counter() - began)
        for name, client in clients.items():
            log = LoadLog()
            times = poisson_arrivals(share * per_s, seed=1, count=len(questions))
            requests = [_request(question, max_new_tokens) for question in questions]
            await run_load(zip(times, requests, strict=True), client.generate, log)
            latency_s = summarize(log.records, Objectives()).latency_s
            assert latency_s is not None
            row = {"system": name, "arrivals_per_s": round(share * per_s, 2)}
            row |= {f"{percent}_s": round(value, 2) for percent, value in asdict(latency_s).items()}
            console.print_json(json.dumps(row))


async def _grouping(prompt_count: int, max_new_tokens: int) -> None:
    rng = random.Random(1)
    for batch_size, (paper_equal, paper_random) in PAPER_GROUPED.items():
        row: dict[str, object] = {"batch_size": batch_size}
        for name, lengths, paper in (("equal", (16, 16), paper_equal), ("random", (5, 40), paper_random)):
            prompts = [
                TokenIds(tuple(rng.randrange(200, 4000) for _ in range(rng.randint(*lengths))))
                for _ in range(prompt_count)
            ]
            options = ClusterOptions(policy="exspec", layout="dense", batch_size=batch_size)
            async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
                await asyncio.gather(
                    *(client.complete(GenerationRequest(prompt, max_new_tokens)) for prompt in prompts)
                )
                counted = (await client.describe()).statistics
            row |= {
                f"{name}_lengths": round(1 - counted.fallback_round_count / counted.round_count, 3),
                f"{name}_lengths_paper": paper,
            }
        console.print_json(json.dumps(row))


if __name__ == "__main__":
    run_command(app)
