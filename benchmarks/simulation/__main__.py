"""Simulated clusters beside real ones: `python -m benchmarks.simulation measure --data train.jsonl`, then `compare`.

`measure` needs a quiet machine and writes what it saw; `compare` simulates the same requests, as often as wanted.
"""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.questions import Gsm8kFile, encode_questions
from benchmarks.simulation.comparing import FIGURES, compare, holds, table_of, write_plot
from benchmarks.simulation.measuring import measure, read_real, write_real
from benchmarks.simulation.stages import figures as stage_figures
from benchmarks.simulation.stages import lane_figures, lane_table_of
from benchmarks.simulation.stages import table_of as table_of_stages
from paceline.files import replace_file
from paceline.process.cluster_plan import ClusterOptions
from training import problems

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False, width=120)
FOLDER = Path("benchmarks/results/simulation")
Folder = Annotated[Path, typer.Option(help="Folder for real-*.json, and for what is compared")]


@app.command("measure")
def measure_real(
    data: Gsm8kFile,
    replicas: int = 1,
    draft_count: str = "5",
    max_new_tokens: int = 160,
    folder: Folder = FOLDER,
) -> None:
    """Measure costs, and what four loads take, with the built-in pair."""
    _, unseen = problems.load(data)
    options = ClusterOptions(draft_count=draft_count, prefix_sharing=False)
    prompts = encode_questions([one.question for one in unseen], options)
    folder.mkdir(parents=True, exist_ok=True)
    real = asyncio.run(measure(options, replicas, prompts, max_new_tokens, console.print))
    write_real(folder / f"real-{replicas}.json", real)


@app.command("compare")
def compare_all(
    folder: Folder = FOLDER,
    seeds: int = 9,
    own_costs: Annotated[bool, typer.Option(help="Take the costs of the timed calls themselves")] = False,
) -> None:
    """Simulate what was measured, and show both."""
    for path in sorted(folder.glob("real-*.json")):
        real = read_real(path)
        comparisons = compare(real, range(seeds), own_costs=own_costs)
        title = f"{real.replica_count} replicas of {real.saved.target.model_id}"
        console.print(title)
        console.print(table_of(comparisons, real.replica_count))
        for one in comparisons:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in one.service_shares.items())
            console.print(f"{one.client_count} clients: simulated services worked {shares}", style="dim")
        write_plot(folder / f"simulation-{real.replica_count}.png", comparisons, title)
        rows = [
            {
                "client_count": one.client_count,
                "holds": holds(one, real.replica_count),
                "errors": dict(zip(FIGURES, one.errors, strict=True)),
                "real": asdict(one.real),
                "simulated": asdict(one.simulated),
            }
            for one in comparisons
        ]
        replace_file(folder / f"simulation-{real.replica_count}.json", json.dumps(rows, indent=2) + "\n")


@app.command("stages")
def simulate_stages() -> None:
    """Simulate batched speculation over a pipeline of eight devices, with made-up costs, beside SpecMemo's figures."""
    console.print(table_of_stages(stage_figures()))
    console.print(lane_table_of(lane_figures()))


if __name__ == "__main__":
    run_command(app)
