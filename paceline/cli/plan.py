"""`paceline plan`: what a pair needs and gives within a memory, before anything is bought or started."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.consoles import words_console
from paceline.cli.options import with_flags
from paceline.cli.plan_view import needs_table, settings_table, shown_bytes, write_picture
from paceline.errors import InvalidRequest, StartupError
from paceline.files import check_all_distinct
from paceline.kv_memory import parse_memory
from paceline.measure.figures import check_plots
from paceline.planning.dimensions import ModelDimensions, read_dimensions
from paceline.planning.flags import variables, write_variables
from paceline.planning.heads import read_heads_size
from paceline.planning.memory import PlannedDevice
from paceline.planning.search import (
    INT8_STEPS,
    Candidate,
    Int8,
    Pair,
    Plan,
    Setting,
    Workload,
    draft_counts,
    floor_costs,
    plan,
    weighed,
)
from paceline.planning.speed import MACHINES, Machine, RoundCosts
from paceline.process.cluster_plan import settings_here
from paceline.process.variables import NO_DRAFT, NO_HEADS
from paceline.simulate.measured_rounds import MeasuredRounds
from paceline.simulate.saved_costs import SavedCosts, read_costs

MODEL_HELP = "Checkpoint directory, the path of a config.json alone, or"
USUAL_ACCEPTANCE = 0.7


@dataclass(frozen=True)
class ModelFlags:
    """Flags that name a pair."""

    target_model: Annotated[str, typer.Option(help=f"{MODEL_HELP} builtin:target.")] = "builtin:target"
    draft_model: Annotated[
        str, typer.Option(help=f"{MODEL_HELP} builtin:draft; none for a target alone. Not read with --heads.")
    ] = "builtin:draft"
    heads: Annotated[
        str,
        typer.Option(help="Folder of heads that draft in place of a draft service; or builtin:clover, builtin:eagle."),
    ] = NO_HEADS

    def pair(self, device: PlannedDevice) -> Pair:
        target = read_dimensions(self.target_model)
        if self.heads != NO_HEADS:
            return Pair(target, None, read_heads_size(self.heads), device)
        return Pair(target, None if self.draft_model == NO_DRAFT else read_dimensions(self.draft_model), None, device)

    @property
    def title(self) -> str:
        drafting = self.heads if self.heads != NO_HEADS else self.draft_model
        return f"{self.target_model} {'alone' if drafting == NO_DRAFT else f'with {drafting}'}"


@dataclass(frozen=True)
class WorkloadFlags:
    """Flags that say what is to be served."""

    conversations: Annotated[int, typer.Option(min=1, help="Conversations that are open at once.")] = 20
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each, prompt and output.")] = 512
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Those of the prompt. Unset: half of them.")] = None
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Chance of a draft to be accepted once those before it are. Unset: as --costs has it, or else 0.7.",
        ),
    ] = None

    def workload(self, pair: Pair, saved: SavedCosts | None) -> Workload:
        """Raise InvalidRequest for a conversation without output, or longer than the models can be."""
        tokens, prompt = self.tokens, self.tokens // 2 if self.prompt_tokens is None else self.prompt_tokens
        if prompt >= tokens:
            raise InvalidRequest(
                f"--prompt-tokens {prompt} leaves none of --tokens {tokens} for output; give fewer",
                field="prompt_tokens",
            )
        longest = min(one.max_length for one in _models(pair))
        if tokens > longest:
            raise InvalidRequest(
                f"--tokens {tokens} is more than the {longest} of the models; give fewer", field="tokens"
            )
        return Workload(self.conversations, tokens, prompt, self._acceptance(saved))

    def _acceptance(self, saved: SavedCosts | None) -> float:
        if self.acceptance is not None:
            return self.acceptance
        measured = saved.costs.drafts_of(saved.draft.model_id) if saved and saved.draft else None
        return measured.rate if measured else USUAL_ACCEPTANCE


@dataclass(frozen=True)
class MachineFlags:
    """Flags that say how fast the models run."""

    device: Annotated[PlannedDevice, typer.Option(help="Where the models run.")] = "cpu"
    bandwidth_gb_s: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Bandwidth of its memory, in 10^9 bytes a second. Unset: 20 on a CPU, 3350 on a GPU."
        ),
    ] = None
    tflop_s: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Arithmetic of it, in 10^12 operations a second. Unset: 0.2 on a CPU, 400 on a GPU."
        ),
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option(help="Costs that `paceline simulate --save-costs` wrote. Unset: the floor by bandwidth."),
    ] = None

    def round_costs(self, pair: Pair, saved: SavedCosts | None) -> list[RoundCosts]:
        """Return the costs of each of `INT8_STEPS`; measured ones are taken for all. Raise InvalidRequest."""
        if saved:
            return [_measured(pair, saved, f"costs measured before, from {self.costs}")] * len(INT8_STEPS)
        usual = MACHINES[self.device]
        machine = Machine(self.bandwidth_gb_s or usual.bandwidth_gb_s, self.tflop_s or usual.tflop_s)
        if not (isfinite(machine.bandwidth_gb_s) and isfinite(machine.tflop_s)):
            raise InvalidRequest("--bandwidth-gb-s and --tflop-s have an end on every machine; give its numbers")
        return [*floor_costs(pair, machine)]


@with_flags("machine", MachineFlags, MachineFlags)
@with_flags("served", WorkloadFlags, WorkloadFlags)
@with_flags("models", ModelFlags, ModelFlags)
def command(
    memory: Annotated[str, typer.Option(help="Bytes for all services' models together, such as 16GiB.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write the settings to, as variables. Unset: none.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="File for the picture, .svg or .png; needs matplotlib. Unset: none.")
    ] = None,
    *,
    models: ModelFlags,
    served: WorkloadFlags,
    machine: MachineFlags,
) -> None:
    """Say whether a pair fits a memory, and how fast it can be. It names the settings for that."""
    console = words_console(soft_wrap=True)
    if picture:
        check_plots()
    check_all_distinct((machine.costs, "--costs"), (picture, "--picture"), (output, "--output"))
    pair = models.pair(machine.device)
    saved = read_costs(machine.costs) if machine.costs else None
    workload = served.workload(pair, saved)
    by_step = machine.round_costs(pair, saved)
    made = plan(pair, workload, by_step, _budget(memory))
    own = _own(pair, workload, lambda own: machine.round_costs(own, saved))
    _tell(console, made, own, by_step[0].origin, workload)
    if picture:
        write_picture(picture, made, own, models.title)
        console.print(f"picture: {picture}")
    chosen = made.chosen
    if chosen is None:
        raise StartupError(_refusal(memory, made.bound))
    if output:
        words = f"paceline plan: {served.conversations} conversations of {served.tokens} tokens in {memory}"
        write_variables(output, variables(chosen, models.target_model, models.draft_model, models.heads), words)
        console.print(f"settings: {output}")


def _models(pair: Pair) -> list[ModelDimensions]:
    return [pair.target, *([pair.draft] if pair.draft else [])]


def _budget(memory: str) -> int:
    try:
        return parse_memory(memory)
    except ValueError as error:
        raise InvalidRequest(f"--memory {memory!r}: {error}", field="memory") from error


def _measured(pair: Pair, saved: SavedCosts, origin: str) -> MeasuredRounds:
    if pair.heads:
        raise InvalidRequest("--costs are of a draft service, and --heads draft; leave out one of them", field="costs")
    rounds = MeasuredRounds(saved if pair.draft else replace(saved, draft=None), origin)
    if pair.draft:
        rounds.check_draft_counts()
    else:
        rounds.check_plain()
    return rounds


def _own(pair: Pair, workload: Workload, round_costs: Callable[[Pair], list[RoundCosts]]) -> Candidate:
    """Return what the services' settings here, or their defaults, would need and give."""
    coordinator, target, int8 = settings_here("coordinator"), settings_here("target"), _int8_here(pair)
    pair = replace(
        pair, target=_dtype_here("target", pair.target), draft=pair.draft and _dtype_here("draft", pair.draft)
    )
    costs = round_costs(pair)[INT8_STEPS.index(int8)]
    rows = min(coordinator.batch_size, workload.conversation_count)
    asked: Any = coordinator.draft_count
    counts = draft_counts(pair) if asked == "auto" else [pair.most_drafts(asked)]
    settings = [Setting(count, rows, target.prefill_chunk_tokens, int8) for count in counts]
    return max((weighed(pair, workload, costs, one) for one in settings), key=lambda one: one.tokens_per_s)


def _dtype_here(role: str, model: ModelDimensions) -> ModelDimensions:
    """Return the model in the dtype that the service's settings here ask for; auto is taken for its checkpoint's."""
    dtype = settings_here(role).dtype
    return model if dtype == "auto" else replace(model, dtype=dtype)


def _int8_here(pair: Pair) -> Int8:
    """Return which weights of int8 the services' settings here ask for, of those that can be planned."""
    if pair.device != "cpu":
        return "none"  # weights are held there as they were
    if settings_here("target").quantization != "none":
        return "both"
    return "draft" if pair.draft and settings_here("draft").quantization in ("int8", "w8a8") else "none"


def _tell(console: Console, made: Plan, own: Candidate, origin: str, workload: Workload) -> None:
    shown = made.chosen or made.bound
    console.print(needs_table("needed within the memory" if made.chosen else "the lower bound", shown))
    console.print(settings_table(made, own))
    console.print(f"speed: {origin}", style="dim")
    if shown.setting.draft_count:
        console.print(f"drafts: each accepted by {workload.acceptance:.2f} once those before it are", style="dim")
    console.print(f"lower bound: {shown_bytes(made.bound.total_bytes)}")
    if made.chosen:
        console.print(_fit(made.chosen.setting.row_count, workload.conversation_count))


def _fit(row_count: int, conversations: int) -> str:
    if row_count == conversations:
        return f"fits: all {conversations} conversations run at once"
    return f"fits in part: {row_count} of {conversations} conversations run at once, and the others wait"


def _refusal(memory: str, bound: Candidate) -> str:
    parts = [("target", bound.target), *([("draft", bound.draft)] if bound.draft else [])]
    words = "; ".join(
        f"{name} {shown_bytes(one.total)}: process {shown_bytes(one.process)}, weights {shown_bytes(one.weights)}, "
        f"cache {shown_bytes(one.kv)}, work {shown_bytes(one.work)}"
        for name, one in parts
    )
    return (
        f"--memory {memory} does not hold the plan: it needs at least {shown_bytes(bound.total_bytes)} ({words}); "
        "give more, fewer --conversations or --tokens, or a smaller model"
    )
