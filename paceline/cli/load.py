"""`paceline load`: requests at random times, independent of the cluster's speed, and their latencies."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from paceline.cli.connection import Connection, connected, with_connection_flags_for_single_calls
from paceline.cli.consoles import words_console
from paceline.cli.load_view import progress_table, summary_lines, summary_table
from paceline.cli.options import (
    Chat,
    DraftingFlags,
    MaxNewTokens,
    Speculation,
    as_prompt,
    draft_limit,
    run_async,
    with_cluster_flags,
    with_drafting_flags,
    with_flags,
    with_sampling_flags,
)
from paceline.cli.prompts import PROMPTS
from paceline.errors import StartupError
from paceline.measure.figures import check_plots
from paceline.measure.files import prepare_folder
from paceline.measure.load.arrivals import poisson_arrivals
from paceline.measure.load.files import write_json, write_plot
from paceline.measure.load.load import LoadLog, Outcome, run_load
from paceline.measure.load.summary import Objectives, summarize
from paceline.process.cluster_plan import ClusterOptions
from paceline.prompt_file import read_lines
from paceline.types import ClusterDescription, DraftingOptions, GenerationRequest, SamplingParameters

DEFAULT_DURATION_S = 30.0
INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM."""


@dataclass(frozen=True)
class LoadPlan:
    """The requests to send and their times."""

    prompts: tuple[str, ...]
    rate_per_s: float
    duration_s: float | None
    request_count: int | None
    seed: int
    max_new_tokens: int
    max_draft_count: int | None
    chat: bool | None
    sampling: SamplingParameters
    drafting: DraftingOptions

    def arrivals(self, cluster: ClusterDescription) -> Iterator[tuple[float, GenerationRequest]]:
        """Yield times in seconds and requests. The prompts repeat when all are used."""
        times = poisson_arrivals(self.rate_per_s, self.seed, duration_s=self.duration_s, count=self.request_count)
        for number, (at_s, prompt) in enumerate(zip(times, cycle(self.prompts), strict=False)):
            yield (
                at_s,
                GenerationRequest(
                    as_prompt(prompt, self.chat, cluster),
                    max_new_tokens=self.max_new_tokens,
                    max_draft_count=self.max_draft_count,
                    sampling=self.sampling,
                    seed=self.seed + number,
                    drafting=self.drafting,
                ),
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings to write beside the results, with the prompts' count in place of the prompts."""
        return asdict(self) | {"prompts": len(self.prompts)}


@dataclass(frozen=True)
class ObjectiveFlags:
    """Flags that say what counts as good."""

    slo_ttft_ms: Annotated[float | None, typer.Option(min=0.0, help="Goodput counts first tokens within this.")] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0.0, help="Goodput counts time per token within this.")] = (
        None
    )

    def objectives(self) -> Objectives:
        return Objectives(_seconds(self.slo_ttft_ms), _seconds(self.slo_tpot_ms))


@with_cluster_flags
@with_connection_flags_for_single_calls
@with_drafting_flags
@with_sampling_flags
@with_flags("wanted", ObjectiveFlags, ObjectiveFlags)
def command(
    rate: Annotated[float, typer.Option(help="Requests a second, on average.")],
    duration_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of arrivals; 30 without --requests.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests to send.")] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="JSON lines with `prompt` or `turns`. Unset: word problems.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for load.json and load.png.")] = Path("load-results"),
    max_new_tokens: MaxNewTokens = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and sampling: the same seed sends the same.")] = 0,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw load.png; needs matplotlib.")] = True,
    speculation: Speculation = True,
    chat: Chat = None,
    *,
    wanted: ObjectiveFlags,
    sampling: SamplingParameters,
    drafting: DraftingFlags,
    connection: Connection,
    options: ClusterOptions,
) -> None:
    """Send Poisson arrivals and report latencies. Throughput and what was refused are told too."""
    if not (math.isfinite(rate) and rate > 0):
        raise typer.BadParameter(f"{rate} is no rate; give requests a second, more than 0", param_hint="--rate")
    if duration_s is None and requests is None:
        duration_s = DEFAULT_DURATION_S
    console = words_console()
    prompts = _prompts(input_file, console)
    limit = draft_limit(speculation, options)
    plan = LoadPlan(
        prompts, rate, duration_s, requests, seed, max_new_tokens, limit, chat, sampling, drafting.options()
    )
    if plot:
        plot = _can_plot(console)
    prepare_folder(output)
    raise typer.Exit(run_async(_load(plan, wanted.objectives(), connection, options, Report(console, output, plot))))


def _can_plot(console: Console) -> bool:
    """Return whether matplotlib is there. Without it the figures are still useful, so the user is only told."""
    try:
        check_plots()
    except StartupError as error:
        console.print(f"no plot will be drawn: {error.message}", style="yellow", markup=False, soft_wrap=True)
        return False
    return True


def _prompts(path: Path | None, console: Console) -> tuple[str, ...]:
    if path is None:
        return PROMPTS
    lines = read_lines(path)
    for line in lines:
        if line.error:
            console.print(f"left out: {line.error}", style="red", soft_wrap=True)
    prompts = tuple(line.prompt for line in lines if line.prompt)
    if not prompts:
        raise typer.BadParameter(f"{path} has no line with a prompt", param_hint="--input")
    return prompts


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


async def _load(
    plan: LoadPlan, objectives: Objectives, connection: Connection, options: ClusterOptions, report: "Report"
) -> int:
    """Run the plan, report the results, and return the exit status: 1 where requests ended and none was answered."""
    log, interrupted = LoadLog(), False
    with report.console.status("connecting") as status:
        async with connected(connection, options) as (client, cluster):
            status.stop()
            try:
                with Live(console=report.console, get_renderable=lambda: progress_table(log), transient=True):
                    await run_load(plan.arrivals(cluster), client.generate, log)
            except asyncio.CancelledError:
                # After Ctrl-C or SIGTERM the measurements so far are still reported.
                interrupted = True
    report.publish(plan, objectives, cluster, log)
    if interrupted:
        report.console.print("interrupted; the results are those until then", style="yellow")
        return INTERRUPTED
    return int(bool(log.records) and not log.count(Outcome.COMPLETED))


@dataclass(frozen=True)
class Report:
    console: Console
    folder: Path
    plot: bool

    def publish(self, plan: LoadPlan, objectives: Objectives, cluster: ClusterDescription, log: LoadLog) -> None:
        summary = summarize(log.records, objectives)
        title = f"{plan.rate_per_s:g} requests/s on {cluster.target.model_id}, B = {cluster.batch_size}"
        self.console.print(summary_table(title, summary))
        for line in summary_lines(summary):
            self.console.print(line, soft_wrap=True)
        settings = plan.settings() | {
            "objectives": asdict(objectives),
            "target": cluster.target.model_id,
            "draft": cluster.draft.model_id if cluster.draft else None,
            "dtype": cluster.target.dtype,
            "quantization": cluster.target.quantization,
            "batch_size": cluster.batch_size,
            "draft_count": cluster.draft_count,
            "policy": cluster.policy,
            "lane_count": cluster.lane_count,
            "sources": None if cluster.sources is None else [one.value for one in cluster.sources],
        }
        write_json(self.folder / "load.json", settings, summary, log.records)
        if self.plot:
            write_plot(self.folder / "load.png", title, summary, log.records)
        self.console.print(f"written to {self.folder}", style="dim", soft_wrap=True)
