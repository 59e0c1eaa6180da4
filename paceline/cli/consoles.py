"""The console that commands print to."""

import io
import json
import sys
from typing import Any

from rich.console import Console


def take_any_text() -> None:
    """Have standard output escape what its encoding lacks, as standard error does: no locale is to end a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(value: Any) -> None:
    """Print a line of JSON, with JSON's own escapes where the output's encoding may lack characters."""
    has_all = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not has_all))


def words_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that shows words as they are: `[v2]` in a file's name is no style, and `:a:` no picture."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
