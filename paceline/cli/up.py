"""`paceline up`: the three services on this machine, until Ctrl-C."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.options import run_async, with_cluster_flags
from paceline.client import describe_target
from paceline.launcher import ClusterOptions, running_cluster
from paceline.numerics import promise
from paceline.rpc import termination

Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]


@with_cluster_flags
def command(
    coordinator_port: Port = 7700,
    draft_port: Port = 7701,
    target_port: Port = 7702,
    metrics_port: Annotated[
        int,
        typer.Option(min=0, max=65533, help="The first of three, for the services' metrics; 0 takes any free ones."),
    ] = 7710,
    *,
    options: ClusterOptions,
) -> None:
    """Start the three services here and print their addresses."""
    options = replace(
        options,
        coordinator_port=coordinator_port,
        draft_port=draft_port,
        target_port=target_port,
        metrics_port=metrics_port,
        log_level="info",
    )
    run_async(_up(options))


async def _up(options: ClusterOptions) -> None:
    console = Console(highlight=False)
    async with running_cluster(options) as addresses:
        console.print(f"coordinator  {addresses.coordinator}")
        console.print(f"draft        {addresses.draft}   {options.draft_model}")
        console.print(f"target       {addresses.target}   {options.target_model}")
        console.print(f"numerics     {promise(await describe_target(addresses.target))}", soft_wrap=True)
        for url in addresses.metrics_urls:
            console.print(f"metrics      {url}")
        console.print("Ctrl-C stops them.", style="dim")
        await termination()
    console.print("stopped", style="dim")
