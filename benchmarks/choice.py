"""The choice of sources beside each source alone, by category: `python -m benchmarks.choice --input question.jsonl`.

All systems are coordinators of one target and one draft service, so that they differ by what they ask for alone:
clusters of a kind differ by a tenth among themselves. The choice is `auto` with every source. It learns while it
serves, so it serves a category's prompts again and again before the runs that are timed. Exit status 1 when an output
of a timed run differs from plain decoding's.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.questions import SpecBenchFile
from paceline.cli.options import Category, SourceSets, comma_list
from paceline.client import Client
from paceline.errors import InvalidRequest
from paceline.measure.alternate import equal_count, median_tokens_per_s, timed_passes
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import MachineWatch, Watch, median_ratio, was_quiet
from paceline.measure.prompts import encode_lines, read_text_codec, select_lines
from paceline.measure.source_sets import ALL_SOURCES, SourceSet, may_draft, name_of, read_source_set
from paceline.measure.system import Measured
from paceline.measure.tables import markdown_table
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.process.launcher import Addresses, running_cluster
from paceline.process.service_process import running_service
from paceline.process.variables import NO_DRAFT

CHOICE = "choice"
# Wide enough for the table, also without a terminal.
console = Console(highlight=False, width=160)

Prompts = Sequence[tuple[int, ...]]
Measurements = Mapping[str, list[Measured]]


@dataclass(frozen=True)
class Work:
    options: ClusterOptions
    source_sets: tuple[SourceSet, ...]
    """What the choice is compared with, each with `draft_count` drafts."""
    draft_count: int
    learning_rounds: int
    runs: int
    max_new_tokens: int


def main(
    input: SpecBenchFile,
    category: Category = None,
    source_sets: SourceSets = "draft,suffix,heads",
    draft_count: Annotated[int, typer.Option(min=1, help="Of the fixed sources.")] = 5,
    heads: Annotated[str, typer.Option(help="Folder of heads, builtin:eagle, or none.")] = "builtin:eagle",
    prompt_count: Annotated[int, typer.Option(min=1, help="Of each category.")] = 24,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    learning_rounds: Annotated[int, typer.Option(min=0, help="Rounds of the choice before the timed runs.")] = 2500,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each system.")] = 9,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
) -> None:
    """Print tokens a second of every system, and what the choice has of the best fixed source, by category."""
    options = ClusterOptions(heads=heads, batch_size=batch_size, prefix_sharing=False)
    sets = tuple(map(read_source_set, comma_list("--source-sets", source_sets)))
    if idle := [one for one in sets if not may_draft(options, "continuous", one)]:
        raise InvalidRequest(f"--source-sets has {name_of(idle[0])}, which cannot draft here", field="source_sets")
    codec = read_text_codec(options.target_model, options.draft_model)
    names = category or sorted({line.category for line in select_lines(input) if line.category})
    if not names:
        raise InvalidRequest(f"--input {input} has no categories; give SpecBench's question.jsonl", field="input")
    chosen = {name: select_lines(input, [name], prompt_count) for name in names}
    prompts = {
        name: [one.token_ids for one in encode_lines(lines, codec, chat=codec.has_chat_template)]
        for name, lines in chosen.items()
    }
    work = Work(options, sets, draft_count, learning_rounds, runs, max_new_tokens)
    rows = asyncio.run(measure(work, prompts))
    console.print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))
    raise typer.Exit(0 if all(row["equal"] == row["prompts"] for row in rows) else 1)


async def measure(work: Work, prompts: Mapping[str, Prompts]) -> list[dict[str, str]]:
    """Return a row for each category."""
    watch, rows = MachineWatch(), []
    async with running_cluster(work.options) as models:
        for name, own in prompts.items():
            rows.append({"category": name} | await _compared(work, models, own, watch))
            console.print(rows[-1], markup=False)
    return rows


async def _compared(work: Work, models: Addresses, prompts: Prompts, watch: Watch) -> dict[str, str]:
    """Compare coordinators that have learnt nothing of other prompts."""
    fixed = str(work.draft_count)
    async with AsyncExitStack() as stack:
        kinds = {CHOICE: ("auto", ALL_SOURCES)} | {name_of(one): (fixed, one) for one in work.source_sets}
        systems = {
            name: await stack.enter_async_context(_coordinator(work, models, *kind)) for name, kind in kinds.items()
        }
        near = await stack.enter_async_context(Client(models.coordinator))
        expected = (await ClusterSystem(near, models, work.max_new_tokens, 0).run(prompts)).outputs
        await _learn(systems[CHOICE], prompts, work.learning_rounds)
        return row_of(await timed_passes(systems, prompts, work.runs, watch), expected)


async def _learn(choice: ClusterSystem, prompts: Prompts, rounds: int) -> None:
    """Answer the prompts until so many rounds ran: later ones try other choices less often."""
    while rounds > 0:
        used = (await choice.run(prompts)).rounds
        assert used
        rounds -= used.round_count


@asynccontextmanager
async def _coordinator(
    work: Work, models: Addresses, draft_count: str, sources: SourceSet
) -> AsyncIterator[ClusterSystem]:
    plan = plan_cluster(replace(work.options, draft_count=draft_count)).coordinator
    flags = (*plan.flags, "--target", models.target, "--draft", models.draft or NO_DRAFT)
    async with running_service(plan.module, flags) as endpoint, Client(endpoint.address, shares_stream=True) as client:
        yield ClusterSystem(client, models, work.max_new_tokens, sources=sources)


def row_of(measured: Measurements, expected: Sequence[Sequence[int]]) -> dict[str, str]:
    """Return one category's figures. `of best` is the choice beside the fixed source with the highest median."""
    rates = {name: median_tokens_per_s(runs) for name, runs in measured.items()}
    best = max((name for name in rates if name != CHOICE), key=lambda name: rates[name])
    every = [run for runs in measured.values() for run in runs]
    return {
        **{name: f"{rate:.0f}" for name, rate in rates.items()},
        "of best": f"{median_ratio(measured[CHOICE], measured[best]):.3f}",
        "quiet": f"{sum(map(was_quiet, every))} of {len(every)}",
        "equal": str(equal_count(every, expected)),
        "prompts": str(len(expected)),
    }


if __name__ == "__main__":
    run_command(main)
