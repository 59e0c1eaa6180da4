"""`paceline up`: the three services on this machine, until Ctrl-C."""

from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.options import BatchSize, DraftCount, DraftModel, Dtype, TargetModel, run_async
from paceline.launcher import ClusterOptions, running_cluster
from paceline.rpc import termination

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]


def command(
    target_model: TargetModel = "builtin:target",
    draft_model: DraftModel = "builtin:draft",
    dtype: Dtype = "auto",
    batch_size: BatchSize = 8,
    draft_count: DraftCount = 5,
    coordinator_port: Port = 7700,
    draft_port: Port = 7701,
    target_port: Port = 7702,
) -> None:
    """Start the three services here and print their addresses."""
    options = ClusterOptions(
        target_model=target_model,
        draft_model=draft_model,
        dtype=dtype,
        batch_size=batch_size,
        draft_count=draft_count,
        coordinator_port=coordinator_port,
        draft_port=draft_port,
        target_port=target_port,
        log_level="info",
    )
    run_async(_up(options))


async def _up(options: ClusterOptions) -> None:
    console = Console(highlight=False)
    async with running_cluster(options) as addresses:
        console.print(f"coordinator  {addresses.coordinator}")
        console.print(f"draft        {addresses.draft}   {options.draft_model}")
        console.print(f"target       {addresses.target}   {options.target_model}")
        console.print("Ctrl-C stops them.", style="dim")
        await termination()
    console.print("stopped", style="dim")
