"""Acceptance, and speculative against plain decoding in turn, of the built-in pair on problems it never saw.

python -m benchmarks.builtin_pair --data train.jsonl

Exit status 1 when an output differs.
"""

import asyncio
import json
from collections.abc import Sequence

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.questions import Gsm8kFile, encode_questions
from paceline.client import Client
from paceline.measure.alternate import equal_count, median_tokens_per_s, timed_passes
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import MachineWatch, counting, median_ratio, was_quiet
from paceline.measure.rounds import RoundUse
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from training import problems

console = Console(highlight=False)


def main(
    data: Gsm8kFile,
    problem_count: int = 64,
    runs: int = 3,
    batch_size: int = 8,
    draft_count: str = "5",
    max_new_tokens: int = 160,
) -> None:
    _, unseen = problems.load(data)
    questions = [problem.question for problem in unseen[:problem_count]]
    options = ClusterOptions(batch_size=batch_size, draft_count=draft_count, prefix_sharing=False)
    found = asyncio.run(measure(questions, options, runs, max_new_tokens))
    console.print_json(json.dumps(found))
    raise typer.Exit(int(found["identical"] != found["problems"]))


async def measure(
    questions: Sequence[str], options: ClusterOptions, runs: int, max_new_tokens: int
) -> dict[str, object]:
    async with running_cluster(options) as addresses, Client(addresses.coordinator) as client:
        systems = {
            "plain": ClusterSystem(client, addresses, max_new_tokens, 0),
            "speculative": ClusterSystem(client, addresses, max_new_tokens),
        }
        measured = await timed_passes(systems, encode_questions(questions, options), runs, MachineWatch())
    return summary(options, measured)


def summary(options: ClusterOptions, measured: dict[str, list[Measured]]) -> dict[str, object]:
    rates = {name: median_tokens_per_s(runs) for name, runs in measured.items()}
    plain, speculative = measured["plain"], measured["speculative"]
    rounds = counting(speculative)[-1].rounds or RoundUse()
    return {
        "problems": len(plain[0].outputs),
        "batch_size": options.batch_size,
        "draft_count": options.draft_count if options.draft_count in (None, "auto") else int(options.draft_count),
        "acceptance": None if rounds.acceptance is None else round(rounds.acceptance, 3),
        "tokens_per_round": round(rounds.tokens_per_row, 2),
        "plain_tokens_per_s": round(rates["plain"]),
        "speculative_tokens_per_s": round(rates["speculative"]),
        "speedup": round(median_ratio(speculative, plain), 2),
        "quiet_runs": {name: sum(map(was_quiet, runs)) for name, runs in measured.items()},
        "identical": equal_count([*plain, *speculative], plain[0].outputs),
    }


if __name__ == "__main__":
    run_command(main)
