"""The command line app and its commands, each from its own module."""

import errno
import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from paceline import __version__
from paceline.cli import (
    bench,
    convert,
    demo,
    equivalence,
    gateway,
    generate,
    laws,
    load,
    plan,
    simulate,
    synth_pair,
    trace,
    up,
)
from paceline.cli.consoles import take_any_text
from paceline.cli.run import command as run
from paceline.errors import PacelineError
from paceline.extras import named_extras
from paceline.process.variables import check_variables

app = typer.Typer(
    name="paceline",
    help="Speculative decoding for large language models as three gRPC services.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of flags short at 80 columns
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        # A check in the app's callback would also run before a command's help.
        check_variables()
        return super().invoke(ctx)


for _name, _module in {
    "up": up,
    "gateway": gateway,
    "generate": generate,
    "run": run,
    "demo": demo,
    "trace": trace,
    "load": load,
    "plan": plan,
    "simulate": simulate,
    "convert": convert,
    "synth-pair": synth_pair,
    "bench": bench,
    "equivalence": equivalence,
}.items():
    app.command(_name, cls=_Command, context_settings=getattr(_module, "SETTINGS", None))(_module.command)
app.add_typer(laws.app, name="laws")


def _run() -> None:
    # A command may be started without one.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    take_any_text()
    try:
        app()
    except SystemExit:
        with suppress(BrokenPipeError):
            sys.stdout.flush()  # when Python does so at exit, nobody can tell of a full disk
        raise


def main() -> None:
    """Run the command line. A PacelineError becomes one line on stderr and exit status 1."""
    try:
        with named_extras():
            _run()
    except PacelineError as error:
        print(f"paceline: {error.message}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"paceline: nothing more can be written: {error}; make room and run it again", file=sys.stderr)
        with suppress(OSError):
            sys.stdout.flush()  # the full disk may be another file's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at exit
        sys.exit(1)
