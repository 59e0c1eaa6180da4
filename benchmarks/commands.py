"""How the commands of benchmarks end: what is wrong with their files or values is one line, as of `paceline`'s own."""

import sys
from collections.abc import Callable
from typing import Any

import typer

from paceline.errors import PacelineError


def run_command(command: typer.Typer | Callable[..., Any]) -> None:
    """Run a command line. What is wrong with its files or values goes to stderr, with exit status 1."""
    try:
        if isinstance(command, typer.Typer):
            command()
        else:
            typer.run(command)
    except (PacelineError, OSError) as error:
        module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
        sys.exit(f"{module.removesuffix('.__main__')}: {error}")
