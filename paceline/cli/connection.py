"""How a command reaches a coordinator: one that runs somewhere, or services of its own."""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import with_flags
from paceline.client import NO_RETRIES, Client, Retry, RetryPolicy
from paceline.errors import StartupError
from paceline.launcher import ClusterOptions, running_cluster
from paceline.security.channels import ChannelSecurity, channel_security
from paceline.supervision import Tell
from paceline.types import ClusterDescription

NOTICE_INTERVAL_S = 15.0


@dataclass(frozen=True)
class Connection:
    """Flags of every command that calls a coordinator. Its calls are made once."""

    address: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of a running coordinator, or several separated by commas. Unset: services of its own."
        ),
    ] = None
    ca: Annotated[
        Path | None, typer.Option(help="PEM CA of the coordinator's certificate; calls then go over TLS.")
    ] = None
    token_file: Annotated[Path | None, typer.Option(help="File with the token to show to the coordinator.")] = None
    certificate: Annotated[Path | None, typer.Option(help="PEM certificate to show to the coordinator.")] = None
    key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Call other machines in plaintext, the token included.")
    ] = False

    @property
    def retries(self) -> RetryPolicy:
        return NO_RETRIES

    def security(self) -> ChannelSecurity:
        """Raises StartupError when a file is wrong, or a flag is of no use."""
        given = [one.name.replace("_", "-") for one in fields(Connection) if getattr(self, one.name) != one.default]
        if given and self.address is None:
            raise StartupError(f"--{given[0]} is for a coordinator that runs already; give its --address too")
        return channel_security(
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            token_file=self.token_file,
            plaintext=self.plaintext,
        )


@dataclass(frozen=True)
class LastingConnection(Connection):
    """Flags of the commands that wait for their coordinator to come back."""

    retry_for_s: Annotated[
        float,
        typer.Option(
            "--retry-for",
            min=0.0,
            help="Seconds to go on trying while the coordinator is away, anew after each piece of output; 0: none.",
        ),
    ] = RetryPolicy.retry_for_s

    @property
    def retries(self) -> RetryPolicy:
        return RetryPolicy(self.retry_for_s)


with_connection_flags = with_flags("connection", LastingConnection, LastingConnection)
with_connection_flags_for_single_calls = with_flags("connection", Connection, Connection)


class RetryNotices:
    """Says on standard error what a command waits for, at the first failure and now and then."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def __call__(self, retry: Retry) -> None:
        now_s = time.monotonic()
        # A command may have many calls in flight, and all of them fail at once.
        if self._told_s is None or now_s - self._told_s >= NOTICE_INTERVAL_S:
            self._told_s = now_s
            print(_notice(retry), file=sys.stderr, flush=True)


def _notice(retry: Retry) -> str:
    if retry.remaining_s is None:
        return f"coordinator {retry.address}: {retry.error.message}; waiting for room"
    # gRPC tells all it did; what the system said stands last.
    why = retry.error.message.rpartition(": ")[2]
    return f"coordinator {retry.address} is away ({why}); trying again for up to {retry.remaining_s:.0f} s"


@asynccontextmanager
async def connected(
    connection: Connection, options: ClusterOptions, *, tell: Tell | None = None
) -> AsyncIterator[tuple[Client, ClusterDescription]]:
    """Yield a client of the coordinator at the address, or of a cluster that lives as long as the block.

    Calls are made again as the connection says, and the user is told. `tell` is as for `running_cluster`.
    """
    security, notices = connection.security(), RetryNotices()
    if connection.address is not None:
        async with Client(connection.address, connection.retries, security=security, on_retry=notices) as client:
            yield client, await client.describe()
        return
    async with (
        running_cluster(options, tell) as addresses,
        Client(addresses.coordinator, connection.retries, on_retry=notices) as client,
    ):
        yield client, await client.describe()
