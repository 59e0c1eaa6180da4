"""Five times the load that the cluster can serve, and inputs made to hold it: `python -m benchmarks.overload`.

Exit status 1 when any part fails.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.commands import run_command
from benchmarks.overload import arrivals, holds
from paceline.files import replace_file

console = Console(highlight=False)


def main(
    times: Annotated[float, typer.Option(help="Arrivals, as a multiple of what can be served.")] = 5.0,
    duration_s: Annotated[float, typer.Option(help="Of each part: measuring capacity, and overload.")] = 60.0,
    queue_limit: int = 16,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.")] = None,
) -> None:
    result = asyncio.run(arrivals.measure(times, duration_s, queue_limit, seed))
    table = Table("", "", title=f"{times:g} times capacity for {duration_s:g} s", show_header=False)
    for name, value in result.items():
        table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    found = asyncio.run(holds.measure())
    console.print(holds.table(found))
    if output:
        replace_file(output, json.dumps(result | {"longest_holds_ms": holds.milliseconds(found)}, indent=2) + "\n")
    sys.exit(not (arrivals.is_sound(result) and holds.are_short(found)))


if __name__ == "__main__":
    run_command(main)
