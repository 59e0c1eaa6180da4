"""Make the built-in pair, step by step: `python -m training target|outputs|answers|draft|heads|grid`; see README.md."""

import asyncio
import math
import random
import sys
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from paceline.cli.options import comma_counts
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.reading import KINDS, WEIGHTS, write_heads
from paceline.errors import InvalidRequest, PacelineError
from paceline.laws.points import write_points
from paceline.process.cluster_plan import CORES, ClusterOptions
from paceline.types import Device
from training import draft, grid, heads, outputs, problems, target
from training.features import FrozenTarget, Texts, texts_of
from training.lessons import Lesson, lessons, read_lessons, write_lessons
from training.loop import MAX_LENGTH, bucketed, fit, new_model, placed, read_model, save
from training.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
Data = Annotated[Path, typer.Option(help="GSM8K train.jsonl", exists=True, dir_okay=False)]
Work = Annotated[Path, typer.Option(help="Folder for the pair; made when missing")]
Place = Annotated[Device, typer.Option(help="Where models are trained")]
Minutes = Annotated[float, typer.Option(min=0.001)]
Target = Annotated[Path, typer.Option(help="Folder of the target's checkpoint", exists=True, file_okay=False)]
OutputsFile = Annotated[
    Path,
    typer.Option(
        "--outputs", help="The target's outputs, as `training outputs` writes them", exists=True, dir_okay=False
    ),
]
EarlierHeads = Annotated[
    Path | None, typer.Option(help="Heads of this kind to go on from; unset: fresh ones", exists=True, file_okay=False)
]
VOCABULARY_SIZE = 4096
MOST_HELD = 1000
"""Outputs that heads are tried with, and do not learn from."""


@app.callback()
def main() -> None:
    """Make the built-in pair, one step after another."""


@app.command("target")
def train_target(
    data: Data, work: Work, minutes: Minutes = 60, token_budget: int = 4096, seed: int = 1, device: Place = "auto"
) -> None:
    """Train the tokenizer and the target."""
    torch.manual_seed(seed)
    seen, _ = problems.load(data)
    rng = random.Random(seed)
    tokenizer = train_tokenizer(
        (target.example_text(p) for p in [*seen, *(problems.vary(q, rng) for q in seen)]), VOCABULARY_SIZE
    )
    folder = work / "target"
    save_tokenizer(tokenizer, folder, MAX_LENGTH)
    model = placed(new_model(target.TARGET_SHAPE, tokenizer.get_vocab()), device)
    progress = fit(
        model,
        target.batches(seen, tokenizer, token_budget, seed),
        target.next_token_loss,
        minutes=minutes,
        peak_rate=2e-3,
        report=console.print,
    )
    save(model, progress, folder)


@app.command("outputs")
def make_outputs(
    data: Data,
    work: Work,
    minutes: Minutes = 15,
    seed: int = 2,
    invented: Annotated[bool, typer.Option(help="Questions of the target's own instead of the file's")] = False,
    unseen: Annotated[bool, typer.Option(help="The problems that nothing is trained on, into unseen.json")] = False,
    draft_model: Annotated[Path | None, typer.Option(help="An earlier draft, for speed; unset: none")] = None,
) -> None:
    """Let the target answer the seen problems, most with fresh numbers, or problems that it makes up."""
    if invented and unseen:
        raise InvalidRequest("--invented and --unseen name two kinds of questions; give one of them")
    tokenizer = read_tokenizer(work / "target")
    rng = random.Random(seed)
    if invented:
        prompts = (outputs.invented_prompt(rng.getrandbits(63), tokenizer) for _ in count())
    else:
        questions = _questions(data, rng, unseen=unseen)
        prompts = (outputs.given_prompt(question, tokenizer) for question in questions)
    cluster = ClusterOptions(
        target_model=str(work / "target"),
        draft_model=str(draft_model or work / "target"),
        draft_count="5" if draft_model else "0",
        batch_size=32,
        target_threads=None if draft_model else CORES,
    )
    made = asyncio.run(outputs.greedy_outputs(prompts, cluster, console.print, minutes=minutes))
    _write(work / ("unseen.json" if unseen else "outputs.json"), made)


@app.command("answers")
def make_answers(
    target: Target,
    prompts: Annotated[Path, typer.Option(help="JSON list of what users say", exists=True, dir_okay=False)],
    outputs_file: Annotated[Path, typer.Option("--outputs", help="File for the outputs")],
    minutes: Minutes = 15,
    max_prompt_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    token_budget: Annotated[int, typer.Option(help="Most tokens of a batch, padding included")] = 16_384,
    device: Place = "auto",
) -> None:
    """Let the target answer prompts of a file, many at once and without the product: for a GPU."""
    outputs_file.parent.mkdir(parents=True, exist_ok=True)  # before the target answers for minutes
    tokenizer = read_tokenizer(target)
    texts = [problems.prompt_text(text) for text in _said(prompts)]
    asked = [tuple(one.ids) for one in tokenizer.encode_batch(texts) if len(one.ids) <= max_prompt_tokens]
    if not asked:
        raise InvalidRequest(
            f"--prompts {prompts} has no prompts of up to --max-prompt-tokens {max_prompt_tokens}; give some"
        )
    batches = bucketed(asked, token_budget, random.Random(0), growth=max_new_tokens)
    model = _teacher(target, device)
    if model.device.type == "cuda":
        model.bfloat16()  # lessons read the outputs so too
    answers = outputs.outputs_at_once(model, batches, console.print, minutes=minutes, max_new_tokens=max_new_tokens)
    _write(outputs_file, list(answers))


def _write(path: Path, made: list[outputs.Output]) -> None:
    console.print(f"{len(made)} outputs, {sum(len(one) - one.prompt_count for one in made)} tokens")
    outputs.write_outputs(path, made)


def _said(prompts: Path) -> list[str]:
    """Return the prompts of a file. Raise InvalidRequest when it is no list of texts."""
    try:
        return TypeAdapter(list[str]).validate_json(prompts.read_bytes())
    except ValidationError as error:
        raise InvalidRequest(f"--prompts {prompts} is no JSON list of texts; give one", field="prompts") from error


def _questions(data: Path, rng: random.Random, *, unseen: bool) -> list[str]:
    seen, others = problems.load(data)
    if unseen:
        return [problem.question for problem in others]
    questions = [problems.vary(problem, rng).question for problem in seen * 3]
    rng.shuffle(questions)
    return questions


@app.command("draft")
def train_draft(
    data: Data,
    work: Work,
    minutes: Minutes = 30,
    token_budget: int = 4096,
    seed: int = 3,
    start_from: Annotated[
        Path | None, typer.Option(help="Draft to go on from; unset: a fresh one", exists=True, file_okay=False)
    ] = None,
    device: Place = "auto",
) -> None:
    """Distil the draft from the target's own outputs and the worked answers; `minutes` begin when it has read them."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = read_tokenizer(work / "target")
    own = outputs.read_outputs(work / "outputs.json", len(tokenizer.get_vocab()))
    gold = _worked_answers(data, tokenizer, rng)
    teacher = _teacher(work / "target", device)
    learnt = list(lessons(teacher, bucketed([*own, *gold], 2 * token_budget, rng), console.print))
    model = read_model(start_from) if start_from else new_model(draft.DRAFT_SHAPE, tokenizer.get_vocab())
    progress = fit(
        placed(model, device),
        draft.batches(learnt, token_budget, seed),
        draft.distillation_loss,
        minutes=minutes,
        peak_rate=2e-3 if start_from else 4e-3,
        report=console.print,
    )
    save_tokenizer(tokenizer, work / "draft", MAX_LENGTH)
    save(model, progress, work / "draft")


def _worked_answers(data: Path, tokenizer: Tokenizer, rng: random.Random) -> list[outputs.Output]:
    """Return the seen problems with fresh numbers and their answers, in the form of outputs."""
    seen, _ = problems.load(data)
    return [draft.as_output(problems.vary(problem, rng), tokenizer) for problem in seen]


def _teacher(folder: Path, device: str) -> LlamaForCausalLM:
    return placed(read_model(folder), device)


@app.command("heads")
def train_heads(
    target: Target,
    outputs: OutputsFile,
    folder: Annotated[Path, typer.Option(help="Folder for the heads; made when missing")],
    features: Annotated[Path | None, typer.Option(help="File of the outputs' features, made when missing")] = None,
    kind: Annotated[str, typer.Option(help=f"Kind of heads: {', '.join(KINDS)}")] = "clover",
    steps: Annotated[int, typer.Option(min=0, help="Most steps")] = 2000,
    minutes: Annotated[float, typer.Option(min=0.001, help="Most minutes of steps; unset: any")] = math.inf,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens of a step, padding included")] = 2048,
    draft_count: Annotated[int, typer.Option(min=1)] = 3,
    most_outputs: Annotated[int | None, typer.Option(min=1)] = None,
    seed: int = 4,
    start_from: EarlierHeads = None,
    device: Place = "auto",
) -> None:
    """Train heads that draft inside the target service, on the features of the target's own outputs."""
    if kind not in KINDS:
        raise InvalidRequest(f"--kind is {kind!r}; give one of {', '.join(KINDS)}", field="kind")
    torch.manual_seed(seed)
    frozen = FrozenTarget.read(target, device)
    texts = texts_of(frozen, outputs, features, most_outputs)
    held, learnt = parted(texts, seed)
    made = _begun(kind, frozen, draft_count, start_from)
    progress = heads.fit_heads(
        made,
        frozen,
        learnt,
        minutes=minutes,
        step_count=steps,
        peak_rate=2e-3 if start_from else 3e-3,
        token_budget=token_budget,
        seed=seed,
        report=console.print,
    )
    write_heads(made.bfloat16(), frozen.config, folder)
    made.float()  # as it will be read
    _show_shares(
        f"{kind}, {progress.step_count} steps, {progress.token_count} tokens",
        heads.right_shares(made, frozen, held, (1, 5)),
    )


def parted(texts: Texts, seed: int) -> tuple[Texts, Texts]:
    """Return texts to try heads with, and those of other prompts to learn from; of one prompt, the same for both."""
    held_count = max(1, min(MOST_HELD, len(texts) // 20))
    held, learnt = outputs.held_out(texts.rows, texts.prompt, held_count, random.Random(seed))
    return texts.part(held), texts.part(learnt or held)


def _show_shares(title: str, by_top: dict[int, list[float]]) -> None:
    for top, shares in by_top.items():
        shown = ", ".join(f"{share:.3f}" for share in shares)
        console.print(f"{title}: right among the {top} likeliest, by place: {shown}")


def _begun(kind: str, frozen: FrozenTarget, draft_count: int, start_from: Path | None) -> HeadsModule:
    """Return fresh heads, or earlier ones. Raise InvalidRequest when these are of another form."""
    made = heads.begun_heads(kind, frozen, draft_count)
    if start_from:
        try:
            made.load_state_dict(load_file(start_from / WEIGHTS))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise InvalidRequest(
                f"--start-from {start_from} has no weights of {kind} heads for this target and --draft-count "
                f"{draft_count}; name a folder of such heads, or leave it out",
                field="start_from",
            ) from error
    return made


@app.command("grid")
def train_grid(
    target: Target,
    outputs_file: OutputsFile,
    folder: Annotated[Path, typer.Option(help="Folder for cells, drafts and points.json; made when missing")],
    held_file: Annotated[
        Path | None,
        typer.Option(
            "--held",
            help="Outputs to count acceptance on; unset: a twentieth of --outputs",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="GSM8K train.jsonl, to learn its answers too; unset: outputs alone", exists=True, dir_okay=False
        ),
    ] = None,
    lessons_file: Annotated[Path | None, typer.Option("--lessons", help="File of lessons, made when missing")] = None,
    depths: Annotated[str, typer.Option(help="Layers of drafts")] = ",".join(map(str, grid.DEPTHS)),
    token_counts: Annotated[str, typer.Option(help="Tokens of training")] = ",".join(map(str, grid.TOKEN_COUNTS)),
    held_out: Annotated[str, typer.Option(help="Cells DEPTH:TOKENS that laws are compared with")] = ",".join(
        f"{depth}:{token_count}" for depth, token_count in grid.HELD_OUT
    ),
    most_outputs: Annotated[int, typer.Option(min=1)] = 12_000,
    seed: int = 5,
    device: Place = "auto",
) -> None:
    """Train drafts of several depths on several numbers of tokens; cells that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)

    def recipe() -> grid.Recipe:
        tokenizer = read_tokenizer(target)
        rng = random.Random(seed)
        vocabulary_size = len(tokenizer.get_vocab())
        own = outputs.read_outputs(outputs_file, vocabulary_size)[:most_outputs]
        rng.shuffle(own)
        if held_file:
            held = outputs.read_outputs(held_file, vocabulary_size)
        else:
            held, own = outputs.held_out(own, lambda one: one.prompt, max(1, len(own) // 20), rng)
        gold = _worked_answers(data, tokenizer, rng) if data else []
        asked = {one.prompt for one in held}
        learnt = [one for one in (*own, *gold) if one.prompt not in asked]
        if not learnt:
            raise InvalidRequest(f"--outputs {outputs_file} has no prompt that is not held out; give more, or --held")
        # A file of them may be from a call that held out others.
        found = [one for one in _lessons(target, learnt, lessons_file, seed, device) if one.output.prompt not in asked]
        if not found:
            raise InvalidRequest(f"--lessons {lessons_file} has no prompt that is not held out; name another file")
        return grid.Recipe(found, held, tokenizer, seed, device, console.print)

    wanted = grid.cells(comma_counts("--depths", depths), comma_counts("--token-counts", token_counts))
    write_points(folder / "points.json", grid.made_points(folder, wanted, grid.cells_named(held_out), recipe))
    console.print(f"written to {folder / 'points.json'}")


def _lessons(target: Path, own: list[outputs.Output], file: Path | None, seed: int, device: str) -> list[Lesson]:
    """Return what the file keeps, or have the target read its outputs and keep that in the file."""
    if file and file.exists():
        return read_lessons(file)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)  # before the target reads for minutes
    made = list(lessons(_teacher(target, device), bucketed(own, 8192, random.Random(seed)), console.print))
    if file:
        write_lessons(file, made)
    return made


def run() -> None:
    """Run the command line. What is wrong with its files becomes one line on stderr and exit status 1."""
    try:
        app()
    except (PacelineError, OSError) as error:
        print(f"training: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run()
