"""Heads inside the target, measured as in Clover's paper (arXiv 2405.00263): `python -m benchmarks.heads COMMAND`."""

import asyncio
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.heads import accuracy, exact, served
from benchmarks.heads import report as reports
from benchmarks.heads.learning import learn, learnt
from benchmarks.heads.synthetic import synthetic_heads
from benchmarks.heads.variants import NAMES, folder_name
from benchmarks.questions import Gsm8kFile, encode_questions
from paceline.builtin import resolve_model
from paceline.cli.options import InputFile, PromptCount, comma_counts, comma_list
from paceline.cli.prompts import selected_lines
from paceline.engine.heads.reading import KINDS, WEIGHTS, write_heads
from paceline.files import replace_file
from paceline.measure.equivalence.precision import Precision
from paceline.measure.figures import check_plots
from paceline.measure.prompts import encode_lines, read_text_codec
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_DRAFT
from training import problems
from training.features import FrozenTarget, texts_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False, width=140)
ACCURACY, SERVED, EXACT, TABLE = "accuracy.json", "served.json", "exact.json", "table.md"
DRAFT_COUNT = 3
MAX_PROMPT_TOKENS = 400
Outputs = Annotated[Path, typer.Option(help="The target's outputs, as `training outputs` writes them", exists=True)]
FeaturesFile = Annotated[Path | None, typer.Option(help="File of the outputs' features, made when missing")]
Work = Annotated[Path, typer.Option(help="Folder for trained heads and results")]
Target = Annotated[str, typer.Option(help="Folder of the target's checkpoint, or builtin:target")]
Threads = Annotated[int | None, typer.Option(min=1, help="Unset: as torch has them")]


@app.callback()
def main() -> None:
    """Train heads, see how often they are right and what they gain, and report it."""


@app.command()
def train(
    outputs: Outputs,
    features: FeaturesFile = None,
    work: Work = Path("heads"),
    target: Target = "builtin:target",
    names: Annotated[str, typer.Option(help="Kinds and variants, with commas")] = ",".join(NAMES),
    steps: Annotated[int, typer.Option(min=1, help="Steps of 2,048 tokens each")] = 600,
    threads: Threads = None,
) -> None:
    """Train each kind and each variant of Clover that `work` lacks."""
    _use_threads(threads)
    frozen = FrozenTarget.read(resolve_model(target))
    texts = texts_of(frozen, outputs, features)
    chosen = comma_list("--names", names, NAMES)
    learn(chosen, frozen, texts, work, step_count=steps, draft_count=DRAFT_COUNT, report=console.print)


@app.command("accuracy")
def measure_accuracy(
    outputs: Outputs,
    features: FeaturesFile = None,
    work: Work = Path("heads"),
    target: Target = "builtin:target",
    most_outputs: int = 100,
    threads: Threads = None,
) -> None:
    """Count how often what was trained is right on outputs to problems that neither it nor the target has seen."""
    _use_threads(threads)
    frozen = FrozenTarget.read(resolve_model(target))
    texts = texts_of(frozen, outputs, features)
    texts = texts.part(texts.rows[:: max(1, len(texts) // most_outputs)])
    found = {}
    for name in NAMES:
        if (work / folder_name(name) / WEIGHTS).exists():
            found[name] = accuracy.measure(learnt(name, frozen, work, DRAFT_COUNT), frozen, texts)
            console.print(f"{name}: {found[name]}")
    replace_file(work / ACCURACY, accuracy.Accuracies.dump_json(found, indent=1).decode())


@app.command()
def synthetic(
    target: Annotated[Path, typer.Option(help="Folder of a target of `paceline synth-pair`", exists=True)],
    work: Work = Path("heads"),
) -> None:
    """Write heads of the kind `eagle` that know the tokens of a synthetic target, to measure speed with."""
    frozen = FrozenTarget.read(target)
    write_heads(synthetic_heads(frozen, DRAFT_COUNT), frozen.config, work / "eagle")


@app.command("served")
def measure_served(
    data: Gsm8kFile,
    work: Work = Path("heads"),
    kinds: Annotated[str, typer.Option(help="Kinds of heads, with commas; the first beside the draft too")] = (
        "clover,medusa,clover2,eagle"
    ),
    batch_sizes: Annotated[str, typer.Option(help="With commas; the results of others are kept")] = "1,2,4,8,16,32,48",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    target_model: str = ClusterOptions.target_model,
    draft_model: str = ClusterOptions.draft_model,
) -> None:
    """Serve plain decoding, the draft service and heads in turn, on problems that none of them has seen."""
    pair = ClusterOptions(target_model=target_model, draft_model=draft_model)
    heads = {name: work / folder_name(name) for name in comma_list("--kinds", kinds, tuple(KINDS))}
    _, unseen = problems.load(data)
    prompts = encode_questions([one.question for one in unseen], pair)
    file = work / SERVED
    known = served.Results.validate_json(file.read_text()) if file.exists() else []
    for size in comma_counts("--batch-sizes", batch_sizes):
        systems = served.systems_at(pair, size, heads, DRAFT_COUNT)
        found = asyncio.run(
            served.measure(systems, prompts, run_count=runs, max_new_tokens=max_new_tokens, report=console.print)
        )
        known = sorted([one for one in known if one.batch_size != size] + found, key=lambda one: one.batch_size)
        replace_file(file, served.Results.dump_json(known, indent=1).decode())
        console.print(reports.served_table(found))


@app.command("exact")
def measure_exact(
    input_file: InputFile = None,
    prompt_count: PromptCount = None,
    work: Work = Path("heads"),
    kinds: Annotated[str, typer.Option(help="Kinds of heads, with commas")] = ",".join(KINDS),
    batch_sizes: Annotated[str, typer.Option(help="With commas")] = "1,8",
    dtypes: Annotated[str, typer.Option(help="As those of `paceline equivalence`, with commas")] = (
        "float32,bfloat16-strict"
    ),
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 24,
    target: Target = "builtin:target",
) -> None:
    """Compare outputs with plain decoding's, greedy and sampled; results of other cases are kept.

    Exit status 1 when an output differs.
    """
    heads = {name: work / folder_name(name) for name in comma_list("--kinds", kinds, tuple(KINDS))}
    pair = ClusterOptions(target_model=target)
    lines = selected_lines(input_file, None, prompt_count)
    encoded = encode_lines(lines, read_text_codec(target, NO_DRAFT), chat=False, max_prompt_tokens=MAX_PROMPT_TOKENS)
    prompts, file = [one.token_ids for one in encoded], work / EXACT
    known = exact.Results.validate_json(file.read_text()) if file.exists() else []
    found = {one.case: one for one in known}

    def keep(result: exact.Exactness) -> None:
        found[result.case] = result
        replace_file(file, exact.Results.dump_json(list(found.values()), indent=1).decode())
        console.print(result)

    for word in comma_list("--dtypes", dtypes):
        comparison = exact.compare(
            pair,
            Precision.parse(word),
            heads,
            prompts,
            draft_count=DRAFT_COUNT,
            batch_sizes=comma_counts("--batch-sizes", batch_sizes),
            max_new_tokens=max_new_tokens,
            report=keep,
        )
        asyncio.run(comparison)
    console.print(reports.exact_table(list(found.values())), markup=False)
    raise typer.Exit(int(any(one.equal_count < one.prompt_count for one in found.values())))


@app.command()
def report(work: Work = Path("heads")) -> None:
    """Print what is known, beside the paper's figures; write it with plots."""
    check_plots()
    tables = []
    if (work / ACCURACY).exists():
        found = accuracy.Accuracies.validate_json((work / ACCURACY).read_text())
        tables += [reports.accuracy_table(found), reports.ablation_table(found)]
        reports.plot_accuracy(found, work / "accuracy.png")
    if (work / SERVED).exists():
        results = served.Results.validate_json((work / SERVED).read_text())
        tables.append(reports.served_table(results))
        reports.plot_served(results, work / "served.png")
    if (work / EXACT).exists():
        tables.append(reports.exact_table(exact.Results.validate_json((work / EXACT).read_text())))
    replace_file(work / TABLE, "\n".join(tables))
    console.print("\n".join(tables), markup=False)


def _use_threads(count: int | None) -> None:
    if count:
        torch.set_num_threads(count)


if __name__ == "__main__":
    run_command(app)
