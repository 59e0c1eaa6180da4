"""Services far from their coordinator, without prepared rounds and with them: `python -m benchmarks.distance`.

A proxy in this process keeps the draft service, and then the target service, away from the coordinator by delaying
all bytes: half of the round trip each way. Exit status 1 when an output differs from that of the target alone.
"""

import asyncio
import os
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.distance.measuring import DistancePlan, Observer, exact_loop, measure
from benchmarks.distance.report import console_table, notes, plot, report
from benchmarks.distance.result import Comparison, DistanceResult, to_json
from paceline.cli.options import InputFile, comma_counts, comma_list
from paceline.cli.progress import work_progress
from paceline.cli.prompts import selected_lines
from paceline.errors import InvalidRequest
from paceline.files import replace_file
from paceline.measure.contention import MachineWatch
from paceline.measure.figures import check_plots
from paceline.measure.files import prepare_folder
from paceline.measure.machine import describe_machine
from paceline.measure.prompts import encode_lines, read_text_codec
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_DRAFT, NO_HEADS

MAX_DELAY_MS = 1000
# Wide enough for the table, also without a terminal.
console = Console(highlight=False, width=160)


def main(
    input_file: InputFile = None,
    output: Annotated[Path, typer.Option(help="Folder for result.json, table.md and distance.png.")] = Path("distance"),
    delays_ms: Annotated[str, typer.Option(help=f"Round trips, 0 to {MAX_DELAY_MS} ms, with commas.")] = "0,1,5,20,50",
    batch_sizes: Annotated[str, typer.Option(help="Generations at once, with commas; at 1 also sampled.")] = "1,8",
    prompt_count: Annotated[int, typer.Option(min=1, help="Prompts; a quarter of them at B = 1.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 3,
    target_model: str = ClusterOptions.target_model,
    draft_model: str = ClusterOptions.draft_model,
    heads: Annotated[
        str, typer.Option(help="Folder of heads that draft beside the draft service, or builtin:eagle.")
    ] = NO_HEADS,
) -> None:
    """Print tokens a second, rounds and drafts at each distance; keep them, with a plot, in a folder."""
    if draft_model == NO_DRAFT:
        raise InvalidRequest("--draft-model is none; give a model that can be kept away", field="draft_model")
    pair = ClusterOptions(target_model=target_model, draft_model=draft_model, heads=heads)
    plan = DistancePlan(pair, _delays_ms(delays_ms), comma_counts("--batch-sizes", batch_sizes), runs, max_new_tokens)
    lines = selected_lines(input_file, None, prompt_count)
    check_plots()
    prepare_folder(output)
    codec = read_text_codec(target_model, draft_model)
    prompts = [one.token_ids for one in encode_lines(lines, codec, chat=codec.has_chat_template)]
    result = _measured(plan, prompts, str(input_file or "the demo"), output)
    replace_file(output / "table.md", report(result))
    plot(result, output / "distance.png")
    console.print(notes(result), markup=False, soft_wrap=True)
    console.print(console_table(result))
    console.print(f"in {output}: {', '.join(sorted(os.listdir(output)))}", markup=False)
    raise typer.Exit(0 if result.is_equal else 1)


def _delays_ms(value: str) -> tuple[float, ...]:
    words = comma_list("--delays-ms", value)
    try:
        found = tuple(map(float, words))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= one <= MAX_DELAY_MS for one in found):
        raise InvalidRequest(
            f"--delays-ms is {value!r}; give numbers from 0 to {MAX_DELAY_MS} with commas between them",
            field="delays_ms",
        )
    return found


def _measured(plan: DistancePlan, prompts: list[tuple[int, ...]], input_name: str, output: Path) -> DistanceResult:
    """Measure; result.json is written after each comparison, so an interruption loses only the one under way."""
    result = DistanceResult(
        plan.pair.target_model,
        plan.pair.draft_model,
        plan.pair.heads,
        input_name,
        plan.max_new_tokens,
        plan.run_count,
        describe_machine(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        {name: version(name) for name in ("paceline", "torch")},
    )

    def compared(comparison: Comparison) -> None:
        nonlocal result
        result = replace(result, comparisons=(*result.comparisons, comparison))
        replace_file(output / "result.json", to_json(result))

    with work_progress(Console(stderr=True)) as work, asyncio.Runner(loop_factory=exact_loop) as runner:
        runner.run(measure(plan, prompts, MachineWatch(), Observer(work.started, work.advanced, compared)))
    return result


if __name__ == "__main__":
    run_command(main)
