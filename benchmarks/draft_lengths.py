"""`auto` against plain decoding and fixed draft lengths: `python -m benchmarks.draft_lengths --help`.

Every system is a cluster of its own. After a warm-up they run alternately over the same prompts, and tables show
medians, of the quiet runs if there are any. Plain decoding has one lane and every core for the target, which is the
most it can use. A world is a pair with its prompts:

- gsm8k: problems that the built-in pair never saw.
- mix: SpecBench prompts of all categories; with `--by-category` also each category by itself.
- synthetic: the mix on a synthetic 100 M target and 5 M draft, with one lane.
- random: gsm8k with a draft of random weights, which is never right.
- slow: gsm8k with the built-in draft made ten times as deep by layers that add nothing.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.drafts import write_random_draft, write_slow_draft
from benchmarks.questions import Gsm8kFile, SpecBenchFile, encode_questions
from paceline.measure.alternate import median_tokens_per_s, timed_passes
from paceline.measure.cluster import running_system
from paceline.measure.contention import MachineWatch, Watch, counting, median_ratio, was_quiet
from paceline.measure.prompts import select_lines
from paceline.measure.synthetic.pair import PairOrder, write_pair
from paceline.measure.synthetic.shapes import SHAPES
from paceline.measure.system import Measured, System
from paceline.measure.tables import markdown_table
from paceline.process.cluster_plan import ClusterOptions
from training import problems

WORLDS = ("gsm8k", "mix", "synthetic", "random", "slow")
PLAIN, AUTO = "plain", "auto"
FIXED = ("2", "3", "4", "5", "8")
console = Console(highlight=False)

Prompts = list[tuple[int, ...]]
Measurements = Mapping[str, list[Measured]]


@dataclass(frozen=True)
class Inputs:
    data: Path
    questions: Path
    prompt_count: int
    max_new_tokens: int
    runs: int
    by_category: bool


@dataclass(frozen=True)
class World:
    options: ClusterOptions
    prompts: Mapping[str, Prompts]
    """Prompts that are measured together, by their name in the table."""


def main(
    data: Gsm8kFile,
    questions: SpecBenchFile,
    worlds: Annotated[str, typer.Option(help=f"Of {', '.join(WORLDS)}.")] = ",".join(WORLDS),
    batch_sizes: str = "1,8",
    prompt_count: Annotated[int, typer.Option(help="Of each world, at B = 8; a quarter of them at less.")] = 96,
    max_new_tokens: int = 128,
    runs: int = 3,
    by_category: Annotated[bool, typer.Option(help="The mix again, one category after the other.")] = False,
) -> None:
    """Print tokens a second of every system, and what auto reaches of the better of plain and the best fixed count."""
    names = worlds.split(",")
    if unknown := [name for name in names if name not in WORLDS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(WORLDS)}", param_hint="--worlds")
    watch = MachineWatch()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for batch_size in map(int, batch_sizes.split(",")):
                count = prompt_count if batch_size >= 8 else -(-prompt_count // 4)
                inputs = Inputs(data, questions, count, max_new_tokens, runs, by_category)
                world = make_world(name, inputs, Path(folder))
                measured = asyncio.run(measure(world, batch_size, inputs, watch))
                console.print(f"\n{name}, B = {batch_size}, {count} prompts, {runs} runs, tokens/s")
                console.print(table(measured))


def make_world(name: str, inputs: Inputs, folder: Path) -> World:
    """Return the pair and the prompts of a world; models that must be made go to `folder`."""
    options = ClusterOptions(prefix_sharing=False)
    if name in ("mix", "synthetic"):
        if name == "synthetic":
            pair = folder / "pair"
            if not pair.exists():
                write_pair(PairOrder("100m/5m", SHAPES["100m/5m"], pair), lambda factor, acceptance: None)
            options = replace(options, target_model=str(pair / "target"), draft_model=str(pair / "draft"), lanes=1)
        return World(options, _mix(inputs, options, by_category=inputs.by_category and name == "mix"))
    if name in ("random", "slow"):
        write = write_random_draft if name == "random" else write_slow_draft
        options = replace(options, draft_model=str(write(folder / "draft")))
    _, unseen = problems.load(inputs.data)
    asked = [problem.question for problem in unseen[: inputs.prompt_count]]
    return World(options, {"all": encode_questions(asked, options)})


def _mix(inputs: Inputs, options: ClusterOptions, *, by_category: bool) -> dict[str, Prompts]:
    def encoded(count: int, *categories: str) -> Prompts:
        lines = select_lines(inputs.questions, categories, count)
        return encode_questions([line.prompt for line in lines if line.prompt], options)

    prompts = {"all": encoded(inputs.prompt_count)}
    if by_category:
        names = sorted({line.category for line in select_lines(inputs.questions) if line.category})
        prompts |= {name: encoded(inputs.prompt_count // 4, name) for name in names}
    return prompts


def systems_of(options: ClusterOptions, batch_size: int) -> dict[str, ClusterOptions]:
    lanes = 1 if batch_size == 1 else options.lanes
    ours = replace(options, batch_size=batch_size, lanes=lanes)
    return {
        PLAIN: replace(ours, draft_count="0", lanes=1),
        **{count: replace(ours, draft_count=count) for count in (*FIXED, AUTO)},
    }


async def measure(world: World, batch_size: int, inputs: Inputs, watch: Watch) -> dict[str, Measurements]:
    """Return the runs of each system, by the name of the world's prompts."""
    measured: dict[str, Measurements] = {}
    async with AsyncExitStack() as stack:
        systems: dict[str, System] = {
            name: await stack.enter_async_context(running_system(options, inputs.max_new_tokens))
            for name, options in systems_of(world.options, batch_size).items()
        }
        for part, prompts in world.prompts.items():
            measured[part] = await timed_passes(systems, prompts, inputs.runs, watch)
    return measured


def table(measured: Mapping[str, Measurements]) -> str:
    """Return a table of one row for each name of prompts. `quiet` counts the quiet runs of all systems.

    `of best` is the median of auto's ratios to the best other system, run by run, over quiet pairs if there are any.
    """
    header = ["prompts", "accepted", *(name for name in next(iter(measured.values()))), "of best", "quiet"]
    return markdown_table(header, [_row(part, runs) for part, runs in measured.items()])


def _row(part: str, runs: Measurements) -> Sequence[str]:
    rates = {name: median_tokens_per_s(ones) for name, ones in runs.items()}
    best = max((name for name in rates if name != AUTO), key=lambda name: rates[name])
    ratio = median_ratio(runs[AUTO], runs[best])
    every = [one for ones in runs.values() for one in ones]
    used = counting(runs[FIXED[-2]])[-1].rounds
    accepted = used.acceptance if used else None
    return [
        part,
        "-" if accepted is None else f"{accepted:.2f}",
        *(f"{one:.0f}" for one in rates.values()),
        f"{ratio:.2f}",
        f"{sum(map(was_quiet, every))} of {len(every)}",
    ]


if __name__ == "__main__":
    run_command(main)
