"""How a command reaches a coordinator: one that runs somewhere, or services of its own."""

import functools
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import ClusterFlags, Command, with_flags
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.errors import InvalidRequest, MethodNotFound, PeerUnavailable, StartupError
from paceline.launcher import ClusterOptions, running_cluster
from paceline.rpc import open_channel
from paceline.rpc.peers import COORDINATOR, service_at, speaks_tls
from paceline.security.channels import ChannelSecurity, channel_security
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


def with_connection_flags(command: Command) -> Command:
    """Give a command the flags of `Connection`. With an address, those of services of one's own are refused."""
    flagged = with_flags("connection", Connection, Connection)(command)
    signature = inspect.signature(flagged)
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    @functools.wraps(flagged)
    def wrapped(context: typer.Context, **values: Any) -> None:
        if values["address"] is not None:
            _refuse_flags_of_own_services(context, values["address"])
        flagged(**values)

    wrapped.__signature__ = signature.replace(parameters=[*signature.parameters.values(), context])  # type: ignore[attr-defined]
    return wrapped


def _refuse_flags_of_own_services(context: typer.Context, address: str) -> None:
    for flag in fields(ClusterFlags):
        source = context.get_parameter_source(flag.name)
        # A request can say how many draft tokens it wants at most, and nothing else of these.
        asked_of_requests = flag.name == "draft_count" and context.params["draft_count"] != "auto"
        if source and source.name == "COMMANDLINE" and not asked_of_requests:
            raise StartupError(
                f"--{flag.name.replace('_', '-')} is for services of one's own, and the coordinator at {address} has "
                "settings of its own; leave the flag out, or --address"
            )


@asynccontextmanager
async def connected(
    connection: Connection, options: ClusterOptions, *, retry: bool = True
) -> AsyncIterator[tuple[Client, ClusterDescription]]:
    """Yield a client of the coordinator at the address, or of a cluster that lives as long as the block.

    Without `retry` the client raises the first failure of a call. Raises InvalidRequest where the coordinator cannot
    give as many draft tokens as are asked for.
    """
    retries, security = RetryPolicy() if retry else NO_RETRIES, connection.security()
    if connection.address is not None:
        async with Client(connection.address, retries, security=security) as client:
            cluster = await _described(client, connection.address, security)
            _check_draft_count(options, cluster)
            yield client, cluster
        return
    async with running_cluster(options) as addresses, Client(addresses.coordinator, retries) as client:
        yield client, await client.describe()


async def _described(client: Client, addresses: str, security: ChannelSecurity) -> ClusterDescription:
    """Raises StartupError where an address leads to something else than a coordinator, naming what is there."""
    try:
        return await client.describe()
    except (MethodNotFound, PeerUnavailable) as error:
        for address in map(str.strip, addresses.split(",")):
            if isinstance(error, MethodNotFound):
                async with open_channel(address, security=security) as channel:
                    found = await service_at(channel)
                if found != COORDINATOR:
                    raise StartupError(
                        f"{address} is {found} and no coordinator; give --address a coordinator's, "
                        "which it prints when it starts"
                    ) from error
            elif security.certificates is None and await speaks_tls(address):
                raise StartupError(f"{address} wants TLS; give the CA of its certificate with --ca") from error
        raise


def _check_draft_count(options: ClusterOptions, cluster: ClusterDescription) -> None:
    wanted, most = options.draft_count, cluster.draft_count
    if wanted and most is not None and (not wanted.isdecimal() or int(wanted) > most):
        raise InvalidRequest(
            f"--draft-count {wanted}: the coordinator drafts {most} tokens a round at most; give a number up to that",
            field="draft_count",
        )
