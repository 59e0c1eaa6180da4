"""The built-in pair on problems it never saw: acceptance, and speculative against plain decoding, alternating.

python -m benchmarks.builtin_pair --data train.jsonl
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from paceline.client import Client, Completion
from paceline.launcher import ClusterOptions, running_cluster
from paceline.types import GenerationRequest, UserMessage
from training import problems

console = Console(highlight=False)


def main(
    data: Annotated[Path, typer.Option(help="GSM8K train.jsonl", exists=True, dir_okay=False)],
    problem_count: int = 64,
    runs: int = 3,
    batch_size: int = 8,
    draft_count: str = "5",
    max_new_tokens: int = 160,
) -> None:
    _, unseen = problems.load(data)
    questions = [problem.question for problem in unseen[:problem_count]]
    options = ClusterOptions(batch_size=batch_size, draft_count=draft_count)
    console.print_json(json.dumps(asyncio.run(measure(questions, options, runs, max_new_tokens))))


async def measure(
    questions: Sequence[str], options: ClusterOptions, runs: int, max_new_tokens: int
) -> dict[str, object]:
    rates: dict[str, list[float]] = {"plain": [], "speculative": []}
    outputs: dict[str, list[Completion]] = {}
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        for _ in range(runs + 1):  # the first of each warms up
            for name, max_draft_count in (("plain", 0), ("speculative", None)):
                began = time.perf_counter()
                outputs[name] = await _answer(client, questions, max_new_tokens, max_draft_count)
                token_count = sum(len(one.tokens) for one in outputs[name])
                rates[name].append(token_count / (time.perf_counter() - began))
    return _summary(options, outputs, {name: median(all_rates[1:]) for name, all_rates in rates.items()})


async def _answer(
    client: Client, questions: Sequence[str], max_new_tokens: int, max_draft_count: int | None
) -> list[Completion]:
    requests = [
        GenerationRequest(UserMessage(question), max_new_tokens=max_new_tokens, max_draft_count=max_draft_count)
        for question in questions
    ]
    return await asyncio.gather(*map(client.complete, requests))


def _summary(
    options: ClusterOptions, outputs: dict[str, list[Completion]], rates: dict[str, float]
) -> dict[str, object]:
    plain, speculative = outputs["plain"], outputs["speculative"]
    usages = [one.finish.usage for one in speculative]
    drafted, accepted = sum(u.drafted_count for u in usages), sum(u.accepted_count for u in usages)
    return {
        "problems": len(plain),
        "batch_size": options.batch_size,
        "draft_count": int(options.draft_count) if options.draft_count != "auto" else "auto",
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "tokens_per_round": round(sum(u.output_count for u in usages) / sum(u.round_count for u in usages), 2),
        "plain_tokens_per_s": round(rates["plain"]),
        "speculative_tokens_per_s": round(rates["speculative"]),
        "speedup": round(rates["speculative"] / rates["plain"], 2),
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(plain, speculative, strict=True)),
    }


if __name__ == "__main__":
    typer.run(main)
