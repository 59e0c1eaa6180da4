"""Bad input for every method of the three services: `python -m benchmarks.fuzz --inputs 20000`.

Real servers with a tiny pair run on real gRPC in this process. Every answer is judged, healthy requests run beside
every few calls, and nothing may be left behind. Prints the answers by method. Exit status 1 at the first thing wrong.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import structlog
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from paceline.files import replace_file
from tests.fuzzing.arena import Arena, Unsound
from tests.fuzzing.attack import attack_until, running_arena

# Wide enough for the names of methods and statuses, also without a terminal.
console = Console(highlight=False, width=150)


def main(
    inputs: Annotated[int, typer.Option(help="Calls to make, at least.")] = 20_000,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="Write the counts as JSON.")] = None,
) -> None:
    # One thread: with a tiny model more threads would only wait for each other.
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began, problem = time.perf_counter(), ""
    with running_arena() as (runner, attacked):
        try:
            attack_until(runner, attacked, inputs, seed)
        except Unsound as error:
            problem = str(error)
    counts = summary(attacked) | {"seed": seed, "elapsed_s": round(time.perf_counter() - began), "problem": problem}
    if output:
        replace_file(output, json.dumps(counts, indent=2) + "\n")
    show(attacked)
    verdict = problem or "Every answer was canonical, every healthy output right, nothing was left behind."
    console.print(verdict, markup=False)
    sys.exit(bool(problem))


def summary(attacked: Arena) -> dict[str, object]:
    return {
        "inputs": attacked.input_count,
        "broken_connections": attacked.connection_count,
        "healthy_requests": attacked.healthy_count,
        "calls": _by_method(attacked.codes),
        "rows": _by_method(attacked.row_codes),
    }


def _by_method(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    methods = sorted({path for path, _ in counts})
    return {path: {code: count for (one, code), count in sorted(counts.items()) if one == path} for path in methods}


def show(attacked: Arena) -> None:
    for title, counts in (("calls", attacked.codes), ("rows", attacked.row_codes)):
        codes = sorted({code for _, code in counts})
        table = Table("method", title, *codes, title=f"{sum(counts.values())} {title}, by status")
        for path, own in _by_method(counts).items():
            table.add_row(
                path.removeprefix("/paceline.v1."), str(sum(own.values())), *(str(own.get(code, 0)) for code in codes)
            )
        console.print(table)
    console.print(
        f"{attacked.connection_count} broken connections, {attacked.healthy_count} healthy requests beside them"
    )


if __name__ == "__main__":
    run_command(main)
