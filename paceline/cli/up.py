"""`paceline up`: the services on this machine, until Ctrl-C."""

from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import typer

from paceline.cli.consoles import words_console
from paceline.cli.options import run_async, teller, with_cluster_flags
from paceline.client import describe_target
from paceline.errors import PacelineError
from paceline.numerics import promise
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.process.variables import NO_HEADS
from paceline.wire import termination

PORTS = ClusterOptions(coordinator_port=7700, draft_port=7701, target_port=7702, metrics_port=7710, log_level="info")
"""Defaults for options that neither a flag nor a variable sets."""


def _port(otherwise: int | None) -> Any:
    return typer.Option(min=0, max=65535, help=f"Port to listen on; 0 takes any free one. Unset: {otherwise}.")


@with_cluster_flags
def command(
    coordinator_port: Annotated[int | None, _port(PORTS.coordinator_port)] = None,
    draft_port: Annotated[int | None, _port(PORTS.draft_port)] = None,
    target_port: Annotated[int | None, _port(PORTS.target_port)] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65533,
            help="The first of three or, with several coordinator processes, more, for the services' metrics; 0 takes "
            f"any free ones. Unset: {PORTS.metrics_port}.",
        ),
    ] = None,
    coordinator_processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Coordinator processes behind the port, for more streams than one core can drive. Unset: 1."
        ),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port of a gateway with OpenAI's HTTP and a page; 0 takes any free one. Unset: none."
        ),
    ] = None,
    *,
    options: ClusterOptions,
) -> None:
    """Start the services here and print their addresses. One that ends is started again."""
    options = replace(
        options,
        host=None,
        coordinator_processes=coordinator_processes,
        coordinator_port=coordinator_port,
        draft_port=draft_port,
        target_port=target_port,
        metrics_port=metrics_port,
        gateway_port=http,
    )
    run_async(_up(options))


async def _up(options: ClusterOptions) -> None:
    console = words_console(soft_wrap=True)
    async with running_cluster(options, teller(words_console(stderr=True)), PORTS) as addresses:
        console.print(f"coordinator  {addresses.coordinator}")
        console.print(
            f"draft        {addresses.draft}   {options.draft_model}" if addresses.draft else "draft        none"
        )
        console.print(f"target       {addresses.target}   {options.target_model}")
        if options.heads != NO_HEADS:
            console.print(f"heads        in the target   {options.heads}")
        # A target that wants TLS or listens elsewhere cannot be asked here; its own log names its numerics.
        with suppress(PacelineError):
            console.print(f"numerics     {promise(await describe_target(addresses.target))}")
        if addresses.gateway_url:
            console.print(f"http         {addresses.gateway_url}")
        for url in addresses.metrics_urls:
            console.print(f"metrics      {url}")
        console.print("Ctrl-C stops them.", style="dim")
        await termination()
    console.print("stopped", style="dim")
