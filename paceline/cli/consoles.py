"""The console that commands print to."""

from rich.console import Console


def words_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that shows words as they are: `[v2]` in a file's name is no style, and `:a:` no picture."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
