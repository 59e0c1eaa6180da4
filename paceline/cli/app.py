"""The commands and what they share. Each command has a module of its own."""

import sys

import typer

from paceline.cli import bench, demo, equivalence, generate, load, run, synth_pair, trace, up
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Speculative decoding for large language models as three gRPC services.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("up")(up.command)
app.command("generate")(generate.command)
app.command("run")(run.command)
app.command("demo")(demo.command)
app.command("trace")(trace.command)
app.command("load")(load.command)
app.command("synth-pair")(synth_pair.command)
app.command("bench")(bench.command)
app.command("equivalence")(equivalence.command)


def main() -> None:
    """Run the command line. A failure that has an explanation is one line on stderr and exit status 1."""
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {error.message}", file=sys.stderr)
        sys.exit(1)
