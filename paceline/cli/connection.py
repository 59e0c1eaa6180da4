"""The connection of a command to a running coordinator or to services that it starts itself."""

import functools
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import ClusterFlags, Command, draft_limit, with_flags
from paceline.client import NO_RETRIES, Client, Retry, RetryPolicy
from paceline.errors import InvalidRequest, MethodNotFound, PacelineError, PeerUnavailable, StartupError
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.process.supervision import Tell
from paceline.security.channels import ChannelSecurity, channel_security
from paceline.types import ClusterDescription, DraftingOptions, DraftSource
from paceline.wire import open_channel
from paceline.wire.peers import COORDINATOR, service_at, speaks_tls

NOTICE_INTERVAL_S = 15.0
OTHER_NAME = "Hostname Verification Check failed"
"""What gRPC says of a certificate with other names than the one that was called."""
NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED: "
"""What TLS says, before the reason, of a certificate that its CA did not issue or that has ended."""
NO_TLS = "WRONG_VERSION_NUMBER"
"""What TLS says of an answer in plaintext."""
NO_GRPC = "Trying to connect an http1.x server"
"""What gRPC says of an answer by HTTP/1."""


@dataclass(frozen=True)
class Connection:
    """Flags of every command that calls a coordinator. Its calls are not retried."""

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
    authority: Annotated[
        str | None,
        typer.Option(help="Name in the coordinator's certificate, where it is not the one in --address."),
    ] = None
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Call other machines in plaintext, the token included.")
    ] = False

    @property
    def retries(self) -> RetryPolicy:
        return NO_RETRIES

    def security(self) -> ChannelSecurity:
        """Return the security of the flags. Raise StartupError when a file is wrong or a flag has no use."""
        given = [one.name.replace("_", "-") for one in fields(Connection) if getattr(self, one.name) != one.default]
        if given and self.address is None:
            raise StartupError(f"--{given[0]} is for a coordinator that runs already; give its --address too")
        return channel_security(
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            token_file=self.token_file,
            plaintext=self.plaintext,
            authority=self.authority,
        )


@dataclass(frozen=True)
class LastingConnection(Connection):
    """Flags of the commands that wait for their coordinator to return."""

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


def _with_flags_of(kind: type[Connection]) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the flags of `kind`. `--address` excludes flags of own services."""

    def decorate(command: Command) -> Command:
        flagged = with_flags("connection", kind, kind)(command)
        signature = inspect.signature(flagged)
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

        @functools.wraps(flagged)
        def wrapped(context: typer.Context, **values: Any) -> None:
            if values["address"] is not None:
                _refuse_flags_of_own_services(context, values["address"])
            flagged(**values)

        wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), context]
        )
        return wrapped

    return decorate


with_connection_flags = _with_flags_of(LastingConnection)
with_connection_flags_for_single_calls = _with_flags_of(Connection)


def _refuse_flags_of_own_services(context: typer.Context, address: str) -> None:
    for flag in fields(ClusterFlags):
        source = context.get_parameter_source(flag.name)
        # A request can carry the most draft tokens, but no other of these flags.
        asked_of_requests = flag.name == "draft_count" and context.params["draft_count"] != "auto"
        if source and source.name == "COMMANDLINE" and not asked_of_requests:
            raise StartupError(
                f"--{flag.name.replace('_', '-')} is for services of one's own, and the coordinator at {address} has "
                "settings of its own; leave the flag out, or --address"
            )


class RetryNotices:
    """Prints to standard error what a command waits for, at most every `NOTICE_INTERVAL_S`."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def __call__(self, retry: Retry) -> None:
        now_s = time.monotonic()
        # A command may have many calls in flight that fail at once.
        if self._told_s is None or now_s - self._told_s >= NOTICE_INTERVAL_S:
            self._told_s = now_s
            print(_notice(retry), file=sys.stderr, flush=True)


def _notice(retry: Retry) -> str:
    if retry.remaining_s is None:
        return f"coordinator {retry.address}: {retry.error.message}; waiting for room"
    why = _last_step(retry.error.message)
    return f"coordinator {retry.address} is away ({why}); trying again for up to {retry.remaining_s:.0f} s"


def _last_step(message: str) -> str:
    """Return the reason of a failed connection: gRPC reports every step, then a status of its own that may be OK."""
    return message.removesuffix(": OK").rpartition(": ")[2]


@asynccontextmanager
async def connected(
    connection: Connection, options: ClusterOptions, *, tell: Tell | None = None
) -> AsyncIterator[tuple[Client, ClusterDescription]]:
    """Yield a client of the coordinator at the address, or of a cluster that runs as long as the block.

    Calls are retried by the connection's policy, and the user is told. `tell` is passed to `running_cluster`. Raise
    InvalidRequest when the coordinator cannot draft as many tokens as asked for.
    """
    security, notices = connection.security(), RetryNotices()
    if connection.address is not None:
        async with Client(connection.address, connection.retries, security=security, on_retry=notices) as client:
            cluster = await _described(client, connection.address, security)
            _check_draft_count(options, cluster)
            yield client, cluster
        return
    async with (
        running_cluster(options, tell) as addresses,
        Client(addresses.coordinator, connection.retries, shares_stream=True, on_retry=notices) as client,
    ):
        yield client, await client.describe()


async def _described(client: Client, addresses: str, security: ChannelSecurity) -> ClusterDescription:
    """Describe the cluster. Raise StartupError when waiting cannot help, naming what answers at the address."""
    try:
        return await client.describe_once()
    except (MethodNotFound, PeerUnavailable) as error:
        for address in map(str.strip, addresses.split(",")):
            await _check_is_coordinator(address, security, error)
    return await client.describe()


async def _check_is_coordinator(address: str, security: ChannelSecurity, error: PacelineError) -> None:
    """Raise StartupError when the address is not a coordinator's, or no connection to it can be had.

    `error` is the failure of a call, at this address or another one.
    """
    try:
        async with open_channel(address, security=security) as channel:
            found = await service_at(channel)
    except PacelineError as own:
        if words := _refused_connection(address, security, own.message):
            raise StartupError(words) from error
        if security.certificates is None and await speaks_tls(address):
            raise StartupError(f"{address} wants TLS; give the CA of its certificate with --ca") from error
        return
    if isinstance(error, MethodNotFound) and found != COORDINATOR:
        raise StartupError(
            f"{address} is {found} and no coordinator; give --address a coordinator's, which it prints when it starts"
        ) from error


def _refused_connection(address: str, security: ChannelSecurity, message: str) -> str | None:
    """Return words for people where `message` says that it will never be had; None where it does not."""
    if NO_GRPC in message:
        return (
            f"{address} answers by HTTP/1, as a gateway and metrics do, and no coordinator; give --address a "
            "coordinator's, which it prints when it starts"
        )
    if OTHER_NAME in message:
        name = security.authority or address.rpartition(":")[0]
        return f"the certificate of {address} has not the name {name}; give a name that it has with --authority"
    if NOT_TRUSTED in message:
        return (
            f"the certificate of {address} is not trusted: {_last_step(message)}; give the CA that issued it with "
            "--ca, or renew it there"
        )
    if NO_TLS in message:
        return f"{address} speaks no TLS; leave --ca out, with --plaintext where it is another machine's"
    return None


def missing_sources(drafting: DraftingOptions, cluster: ClusterDescription, *, has_prediction: bool) -> str | None:
    """Return words for people where sources that a request names, or needs for its prediction, are not there.

    So too where no draft service has the draft model that it names.
    """
    if cluster.sources is None:
        return None  # it does not tell
    wanted = set(drafting.sources)
    if has_prediction and drafting.allows(DraftSource.PREDICTION):
        wanted.add(DraftSource.PREDICTION)
    if drafting.draft_model and drafting.allows(DraftSource.DRAFT):
        wanted.add(DraftSource.DRAFT)
    missing = [one.value for one in DraftSource if one in wanted and one not in cluster.sources]
    left = [one for one in cluster.sources if drafting.allows(one)]
    if DraftSource.DRAFT in wanted & {*left} and (models := _other_models(drafting.draft_model, cluster)):
        missing.append(f"draft model {drafting.draft_model} (but {' and '.join(models)})")
        left.remove(DraftSource.DRAFT)
    if not missing:
        return None
    return (
        f"the coordinator has no {' and no '.join(missing)}, so "
        f"{'drafts come from ' + ' and '.join(left) if left else 'nothing drafts for this'}: the output is the same"
    )


def _other_models(draft_model: str, cluster: ClusterDescription) -> list[str]:
    """Return the models of the draft services if all are others than the one named, and are known."""
    models = {one.model_id for one in cluster.drafts}
    return [] if not draft_model or models & {draft_model, ""} else sorted(models)


def _check_draft_count(options: ClusterOptions, cluster: ClusterDescription) -> None:
    wanted, most = draft_limit(True, options), cluster.draft_count
    if wanted is not None and most is not None and wanted > most:
        raise InvalidRequest(
            f"--draft-count {wanted}: the coordinator drafts {most} tokens a round at most; give a number up to that",
            field="draft_count",
        )
