"""How a command reaches a coordinator: one that runs somewhere, or services of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import with_flags
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.errors import StartupError
from paceline.launcher import ClusterOptions, running_cluster
from paceline.security.channels import ChannelSecurity, channel_security
from paceline.supervision import Tell
from paceline.types import ClusterDescription


@dataclass(frozen=True)
class Connection:
    """Flags of every command that calls a coordinator."""

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

    def security(self) -> ChannelSecurity:
        """Raises StartupError when a file is wrong, or a flag is of no use."""
        given = [one.name.replace("_", "-") for one in fields(self) if getattr(self, one.name) != one.default]
        if given and self.address is None:
            raise StartupError(f"--{given[0]} is for a coordinator that runs already; give its --address too")
        return channel_security(
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            token_file=self.token_file,
            plaintext=self.plaintext,
        )


with_connection_flags = with_flags("connection", Connection, Connection)


@asynccontextmanager
async def connected(
    connection: Connection, options: ClusterOptions, *, retry: bool = True, tell: Tell | None = None
) -> AsyncIterator[tuple[Client, ClusterDescription]]:
    """Yield a client of the coordinator at the address, or of a cluster that lives as long as the block.

    Without `retry` the client raises the first failure of a call. `tell` is as for `running_cluster`.
    """
    retries, security = RetryPolicy() if retry else NO_RETRIES, connection.security()
    if connection.address is not None:
        async with Client(connection.address, retries, security=security) as client:
            yield client, await client.describe()
        return
    async with running_cluster(options, tell) as addresses, Client(addresses.coordinator, retries) as client:
        yield client, await client.describe()
