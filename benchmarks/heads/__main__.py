"""Heads inside the target, measured as in Clover's paper (arXiv 2405.00263): `python -m benchmarks.heads COMMAND`."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.heads.learning import frozen_target, learn
from benchmarks.heads.variants import NAMES
from paceline.builtin import resolve_model
from paceline.cli.options import comma_list
from training.features import features_of

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False, width=140)
Work = Annotated[Path, typer.Option(help="Folder for trained heads and results")]
Target = Annotated[str, typer.Option(help="Folder of the target's checkpoint, or builtin:target")]
DRAFT_COUNT = 3


@app.callback()
def main() -> None:
    """Train heads, see how often they are right and what they gain, and report it."""


@app.command()
def train(
    outputs: Annotated[Path, typer.Option(help="The target's outputs, as `training outputs` writes them", exists=True)],
    features: Annotated[Path | None, typer.Option(help="File of the outputs' features, made when missing")] = None,
    work: Work = Path("heads"),
    target: Target = "builtin:target",
    names: Annotated[str, typer.Option(help="Kinds and variants, with commas")] = ",".join(NAMES),
    steps: int = 600,
    threads: int | None = None,
) -> None:
    """Train each kind and each variant of Clover that `work` lacks."""
    if threads:
        torch.set_num_threads(threads)
    frozen = frozen_target(resolve_model(target))
    texts = features_of(frozen, outputs, features)
    chosen = comma_list("--names", names, NAMES)
    learn(chosen, frozen, texts, work, step_count=steps, draft_count=DRAFT_COUNT, report=console.print)


if __name__ == "__main__":
    app()
