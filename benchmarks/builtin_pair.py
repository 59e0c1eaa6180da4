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
    problem_count: int = 96,
    runs: int = 3,
    batch_size: int = 8,
    draft_count: int = 5,
    max_new_tokens: int = 160,
    threads: Annotated[int | None, typer.Option(help="For each model service. Unset: half the cores.")] = None,
) -> None:
    _, unseen = problems.load(data)
    questions = [problem.question for problem in unseen[:problem_count]]
    options = ClusterOptions(batch_size=batch_size, draft_count=draft_count)
    if threads:
        options = ClusterOptions(batch_size=batch_size, draft_count=draft_count, threads=threads)
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
                outputs[name] = await asyncio.gather(
                    *(
                        client.complete(
                            GenerationRequest(
                                UserMessage(question), max_new_tokens=max_new_tokens, max_draft_count=max_draft_count
                            )
                        )
                        for question in questions
                    )
                )
                elapsed_s = time.perf_counter() - began
                rates[name].append(sum(len(one.tokens) for one in outputs[name]) / elapsed_s)
    usages = [one.finish.usage for one in outputs["speculative"]]
    drafted, accepted = sum(u.drafted_count for u in usages), sum(u.accepted_count for u in usages)
    plain, speculative = median(rates["plain"][1:]), median(rates["speculative"][1:])
    return {
        "problems": len(questions),
        "batch_size": options.batch_size,
        "draft_count": options.draft_count,
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "tokens_per_round": round(sum(u.output_count for u in usages) / sum(u.round_count for u in usages), 2),
        "plain_tokens_per_s": round(plain),
        "speculative_tokens_per_s": round(speculative),
        "speedup": round(speculative / plain, 2),
        "identical": sum(
            a.token_ids == b.token_ids for a, b in zip(outputs["plain"], outputs["speculative"], strict=True)
        ),
    }


if __name__ == "__main__":
    typer.run(main)
