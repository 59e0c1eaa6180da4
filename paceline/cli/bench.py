"""`paceline bench`: throughput beside other systems, on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.checks import MAX_DRAFT_COUNT
from paceline.cli.consoles import words_console
from paceline.cli.options import (
    POLICIES,
    Category,
    Chat,
    InputFile,
    PromptCount,
    SourceSets,
    comma_counts,
    comma_list,
    is_draft_count,
    run_async,
    with_flags,
    with_pair_flags,
)
from paceline.cli.progress import work_progress
from paceline.cli.prompts import selected_lines
from paceline.errors import InvalidRequest
from paceline.files import replace_file
from paceline.measure.bench.grid import HEADS, KINDS, LLAMA_CPP, SYSTEMS, BenchPlan, groups
from paceline.measure.equivalence.precision import AS_SERVED, DTYPES, Precision
from paceline.measure.files import prepare_folder
from paceline.measure.peers.llama_cpp import check_llama_cpp
from paceline.measure.prompts import MeasuredPrompt, encode_lines, read_text_codec
from paceline.measure.source_sets import ALL, read_source_set
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_HEADS

if TYPE_CHECKING:
    from paceline.measure.bench.result import BenchResult


@dataclass(frozen=True)
class Extent:
    """Defaults for how much is measured."""

    batch_sizes: str
    prompt_count: int | None
    max_new_tokens: int
    runs: int


FULL = Extent("1,2,4,8,16,32", None, 128, 3)
QUICK = Extent("1,8", 24, 48, 2)


@dataclass(frozen=True)
class BenchFlags:
    """Flags that say what is measured."""

    quick: Annotated[bool, typer.Option("--quick", help="Under five minutes: less of everything not set.")] = False
    batch_sizes: Annotated[
        str | None,
        typer.Option(help=f"Generations at once, with commas. Unset: {FULL.batch_sizes}; quick: {QUICK.batch_sizes}."),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Most tokens of output. Unset: {FULL.max_new_tokens}; quick: {QUICK.max_new_tokens}."
        ),
    ] = None
    runs: Annotated[int | None, typer.Option(min=1, help=f"Timed runs. Unset: {FULL.runs}; quick: {QUICK.runs}.")] = (
        None
    )
    systems: Annotated[str, typer.Option(help=f"What is measured, with commas: of {', '.join(SYSTEMS)}.")] = ",".join(
        kind for kind in KINDS if kind != LLAMA_CPP
    )
    policies: Annotated[str, typer.Option(help=f"How groups are formed, with commas: of {', '.join(POLICIES)}.")] = (
        "continuous"
    )
    draft_counts: Annotated[
        str, typer.Option(help="Draft tokens a round and generation, with commas: numbers, auto, or both.")
    ] = "5"
    source_sets: SourceSets = ALL
    by_category: Annotated[
        bool, typer.Option("--by-category", help="Each category of the file by itself too, which tells its speed.")
    ] = False
    dtypes: Annotated[
        str, typer.Option(help=f"Types of weights and cache, with commas: of {', '.join(DTYPES)}, {AS_SERVED}")
    ] = "auto"
    chat: Chat = None
    gguf: Annotated[Path | None, typer.Option(help="The target's weights for llama.cpp.")] = None

    @property
    def extent(self) -> Extent:
        return QUICK if self.quick else FULL

    def plan(self, pair: ClusterOptions) -> BenchPlan:
        """Raise InvalidRequest for a flag that cannot be read, heads that nobody gave, and what measures nothing."""
        plan = BenchPlan(
            pair,
            comma_list("--systems", self.systems, SYSTEMS),
            comma_counts("--batch-sizes", self.batch_sizes or self.extent.batch_sizes),
            comma_list("--policies", self.policies, POLICIES),
            _draft_counts(self.draft_counts),
            tuple(Precision.parse(word) for word in comma_list("--dtypes", self.dtypes)),
            self.max_new_tokens or self.extent.max_new_tokens,
            self.runs or self.extent.runs,
            self.gguf,
            tuple(map(read_source_set, comma_list("--source-sets", self.source_sets))),
            self.by_category,
        )
        if HEADS in plan.kinds and pair.heads == NO_HEADS:
            raise InvalidRequest("--systems has heads, and there are none; give --heads", field="systems")
        if self.gguf and LLAMA_CPP not in plan.kinds:
            raise InvalidRequest(
                f"--gguf {self.gguf} is for {LLAMA_CPP}, which --systems {self.systems} lacks; add it there, or leave "
                "--gguf out",
                field="gguf",
            )
        if not groups(plan):
            raise InvalidRequest(
                f"--systems {self.systems} leaves nothing to measure: no peer drafts with a model without "
                "--draft-model, and under the paper's --policies no other of --source-sets than draft drafts; give "
                "what one lacks, or other --systems",
                field="systems",
            )
        return plan


@with_pair_flags
@with_flags("measured", BenchFlags, BenchFlags)
def command(
    input_file: InputFile = None,
    output: Annotated[Path, typer.Option(help="Folder for result.json, table.md and two plots.")] = Path("bench"),
    category: Category = None,
    prompt_count: PromptCount = None,
    *,
    measured: BenchFlags,
    pair: ClusterOptions,
) -> None:
    """Measure throughput beside other systems. They run in turn: speculative and plain decoding, Hugging Face and
    others, with tables and plots.

    Interrupted, it keeps what it has measured.
    """
    plan = measured.plan(pair)
    lines = selected_lines(input_file, category, prompt_count or measured.extent.prompt_count)
    if plan.by_category and not any(line.category for line in lines):
        raise InvalidRequest(
            "--by-category needs lines with a `category`, and there are none; give --input FILE", field="by_category"
        )
    # Imported late: torch and matplotlib are slow to import, and not every installation has them.
    from paceline.measure.figures import check_plots

    check_plots()
    if LLAMA_CPP in plan.kinds:
        check_llama_cpp(plan.gguf)
    prepare_folder(output)
    codec = read_text_codec(pair.target_model, pair.draft_model)
    chat = codec.has_chat_template if measured.chat is None else measured.chat
    _Reporting(output).run(plan, encode_lines(lines, codec, chat=chat), str(input_file or "the demo"))


def _draft_counts(value: str) -> tuple[str, ...]:
    words = comma_list("--draft-counts", value)
    if wrong := [word for word in words if not is_draft_count(word)]:
        raise InvalidRequest(
            f"--draft-counts has {wrong[0]!r}; give 0 to {MAX_DRAFT_COUNT}, or auto", field="draft_counts"
        )
    return words


class _Reporting:
    """Saves the result after every pass, so that an interruption loses none; shows and plots it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._console = words_console(soft_wrap=True)
        self._result: BenchResult | None = None

    def run(self, plan: BenchPlan, prompts: list[MeasuredPrompt], input_name: str) -> None:
        from paceline.measure.bench.bench import Bench, Observer

        try:
            with work_progress(words_console(stderr=True)) as work:
                observer = Observer(work.started, work.advanced, self._measured)
                run_async(Bench(plan, prompts, input_name, observer).run())
        finally:
            self._summarise()

    def _measured(self, result: "BenchResult") -> None:
        from paceline.measure.bench.summary import to_json

        self._result = result
        replace_file(self._folder / "result.json", to_json(result))

    def _summarise(self) -> None:
        from paceline.measure.bench.plots import plot_rounds, plot_throughput
        from paceline.measure.bench.report import bench_report

        if self._result is None:
            return
        report = bench_report(self._result)
        replace_file(self._folder / "table.md", report)
        self._console.print(report, markup=False)
        plot_throughput(self._result, self._folder / "throughput.png")
        plot_rounds(self._result, self._folder / "round.png")
        self._console.print(f"in {self._folder}: {', '.join(sorted(os.listdir(self._folder)))}", markup=False)
