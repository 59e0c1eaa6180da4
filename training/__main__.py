"""Make the built-in pair: `python -m training --data train.jsonl --output paceline/builtin`."""

import json
import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from training import problems, target
from training.loop import MAX_LENGTH, fit, new_model
from training.tokenizer import save_tokenizer, train_tokenizer

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(highlight=False)
Data = Annotated[Path, typer.Option(help="GSM8K train.jsonl", exists=True, dir_okay=False)]
Work = Annotated[Path, typer.Option(help="Folder for the pair; made when missing")]
VOCABULARY_SIZE = 4096


@app.callback()
def main() -> None:
    """Make the built-in pair, one step after another."""


@app.command("target")
def train_target(data: Data, work: Work, minutes: float = 60, token_budget: int = 4096, seed: int = 1) -> None:
    """Train the tokenizer and the target."""
    torch.manual_seed(seed)
    seen, _ = problems.load(data)
    rng = random.Random(seed)
    tokenizer = train_tokenizer(
        (target.example_text(p) for p in [*seen, *(problems.vary(q, rng) for q in seen)]), VOCABULARY_SIZE
    )
    folder = work / "target"
    save_tokenizer(tokenizer, folder, MAX_LENGTH)
    model = new_model(target.TARGET_SHAPE, tokenizer.get_vocab())
    progress = fit(
        model,
        target.batches(seen, tokenizer, token_budget, seed),
        target.next_token_loss,
        minutes=minutes,
        peak_rate=2e-3,
        report=console.print,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(vars(progress)))


if __name__ == "__main__":
    app()
