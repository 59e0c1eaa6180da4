"""`paceline convert`: pickled weights and a sentencepiece tokenizer in the form that the services load."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from paceline.cli.consoles import words_console


def command(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or hub id with or without @REVISION.")],
    output: Annotated[
        Path | None, typer.Option(help="New folder. Unset: the model's name with -safetensors, beside a directory.")
    ] = None,
) -> None:
    """Write a checkpoint as safetensors and tokenizer.json. No code in it is run."""
    # Imported late: torch is slow to import, and `paceline` runs without it.
    from paceline.engine.model.conversion import convert

    console = words_console(soft_wrap=True)
    output = output or _beside(model)
    with console.status(Text(f"converting {model}")):  # of a string rich would read styles
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
    if os.path.isdir(path):  # false for what can be no name too
        return path.resolve().with_name(f"{path.resolve().name}-safetensors")
    name, _, revision = model.partition("@")  # a revision may have slashes of its own
    return Path("@".join(filter(None, (Path(name).name, revision.replace("/", "-")))) + "-safetensors")
