"""What `--help` shows on a terminal of 80 columns."""

from typing import Any

import pytest
import typer

from paceline.cli.app import app

COMMANDS: Any = typer.main.get_command(app)
WIDTH = 80


def help_of(*words: str) -> str:
    """Return the help of a command, found by its words."""
    command = COMMANDS
    for word in words:
        command = command.commands[word]
    context = command.make_context(" ".join(("paceline", *words)), [], resilient_parsing=True, terminal_width=WIDTH)
    return str(command.get_help(context))


@pytest.mark.parametrize(("words", "count"), [((), len(COMMANDS.commands)), (("laws",), 1)])
def test_no_line_about_a_command_is_cut_short(words: tuple[str, ...], count: int) -> None:
    lines = help_of(*words).partition("Commands:\n")[2].splitlines()
    assert len(lines) == count
    assert all(one.endswith(".") and not one.endswith("...") for one in lines)


@pytest.mark.parametrize("name", [one for one in COMMANDS.commands if one not in ("gateway", "laws")])
def test_no_flag_is_cut_short(name: str) -> None:
    shown, command = help_of(name), COMMANDS.commands[name]
    flags = [flag for one in command.params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")]
    assert flags and not [flag for flag in flags if flag not in shown]
