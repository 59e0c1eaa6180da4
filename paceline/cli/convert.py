"""`paceline convert`: pickled weights and a sentencepiece tokenizer in the form that the services load."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or hub id with or without @REVISION.")],
    output: Annotated[
        Path | None, typer.Option(help="New folder. Unset: the model's name with -safetensors, beside a directory.")
    ] = None,
) -> None:
    """Write a checkpoint as safetensors and tokenizer.json. No code in it is run."""
    # Imported late: torch is slow to import, and `paceline` runs without it.
    from paceline.engine.model.conversion import convert

    console = Console(highlight=False, soft_wrap=True)
    output = output or _beside(model)
    with console.status(f"converting {model}"):
        done = convert(model, output)
    weights = f"{done.tensor_count} tensors, {done.total_bytes / 2**30:.2f} GiB of {', '.join(done.dtypes)}"
    console.print(f"weights    {weights if done.tensor_count else 'as they were'}")
    compared = f"tokenizer.json; equal to sentencepiece on {done.compared_texts} texts"
    console.print(f"tokenizer  {compared if done.compared_texts else 'as it was'}")
    if not done.has_chat_template:
        console.print("template   none: prompts are sent as they are, unless you add a chat_template.jinja")
    console.print(f"Load it with --target-model or --draft-model {output}")


def _beside(model: str) -> Path:
    path = Path(model).expanduser()
    name = f"{path.resolve().name if path.is_dir() else path.name}-safetensors"
    return path.resolve().with_name(name) if path.is_dir() else Path(name)
