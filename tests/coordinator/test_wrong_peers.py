"""Errors for an address that leads to something other than intended."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from coordinator.background import background
from coordinator.config import CoordinatorSettings
from coordinator.protocols import Remote
from coordinator.replicas.clients import RemoteDrafter, RemoteVerifier
from coordinator.replicas.discovery import HostPort, parse_addresses, resolve
from coordinator.replicas.replica import Replica
from coordinator.replicas.replicas import Replicas
from coordinator.serving import running_coordinator
from coordinator.startup import wait_for_target
from paceline.cli import simulate
from paceline.cli.app import app
from paceline.cli.connection import Connection, LastingConnection, RetryNotices, connected
from paceline.client import Retry
from paceline.codec.models import model_to_pb
from paceline.codec.names import DRAFT_SERVICE, GENERATION_SERVICE, TARGET_SERVICE
from paceline.codec.versions import versions_to_pb
from paceline.errors import IncompatiblePair, PeerFailed, PeerUnavailable, StartupError
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.instruments import Instruments
from paceline.security.access import Context
from paceline.security.channels import LOCAL, ChannelSecurity
from paceline.types import CacheDescription, ComputeDescription, ModelDescription
from paceline.v1 import target_service_pb2
from paceline.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from paceline.wire import RunningServer, ServerOptions, open_channel, running_server
from paceline.wire.peers import service_at
from tests.certificates import Authority, watched
from tests.coordinators import fits
from tests.fakes.model_services import FakeVerifier, describe

pytestmark = pytest.mark.review


@asynccontextmanager
async def serving(name: str, options: ServerOptions | None = None) -> AsyncIterator[RunningServer]:
    """Run a server that claims to be a service and is none."""
    async with running_server(
        "127.0.0.1", 0, [name], lambda server: None, grace_s=0, options=options or ServerOptions()
    ) as server:
        server.set_serving(True)
        yield server


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (DRAFT_SERVICE, "a draft service"),
        (TARGET_SERVICE, "a target service"),
        ("other.Service", "no service of Paceline"),
    ],
)
async def test_a_command_says_what_answers_where_there_is_no_coordinator(name: str, found: str) -> None:
    """review G6"""
    async with serving(name) as server:
        with pytest.raises(StartupError, match=f"{server.address} is {found} and no coordinator"):
            async with connected(Connection(server.address), ClusterOptions()):
                pass


async def test_an_address_where_nothing_answers_is_not_said_to_be_another_service() -> None:
    async with serving(DRAFT_SERVICE) as server:
        with pytest.raises(StartupError, match=f"{server.address} is a draft service and no coordinator"):
            async with connected(Connection(f"127.0.0.1:1,{server.address}"), ClusterOptions()):
                pass
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(PeerUnavailable):
            await service_at(channel)


async def test_costs_that_no_coordinator_is_asked_for_are_refused_with_what_answers() -> None:
    """`simulate` said "Method not found!", and of which address it did not."""
    async with serving(TARGET_SERVICE) as server:
        with pytest.raises(StartupError, match=f"{server.address} is a target service and no coordinator"):
            await simulate._asked(Connection(server.address))


async def test_a_command_that_calls_a_port_of_http_is_told_so_at_once() -> None:
    """The gateway's port is the address at hand: a command waited for two minutes, for a coordinator that was away."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        with pytest.raises(StartupError, match=f"{address} answers by HTTP/1, .*; give --address a coordinator's"):
            async with connected(LastingConnection(address, retry_for_s=0.01), ClusterOptions()):
                pass


async def test_a_command_that_calls_a_tls_port_in_plaintext_is_told_of_the_ca(tmp_path: Path) -> None:
    """review G6"""
    async with serving(GENERATION_SERVICE, watched(Authority(tmp_path).issue("127.0.0.1"))) as server:
        with pytest.raises(StartupError, match=f"{server.address} wants TLS; give the CA .* with --ca"):
            async with connected(LastingConnection(server.address), ClusterOptions()):
                pass


async def test_a_certificate_that_is_not_trusted_ends_a_command_at_once_with_the_reason(tmp_path: Path) -> None:
    """A command waited for two minutes, and said that its coordinator was away: "OK"."""
    authority, other = Authority(tmp_path / "own"), Authority(tmp_path / "other")
    ended = authority.issue("127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC))
    for own, why in ((ended, "certificate has expired"), (other.issue("127.0.0.1"), "unable to get local issuer")):
        async with serving(GENERATION_SERVICE, watched(own)) as server:
            words = f"the certificate of {server.address} is not trusted: {why}.*; give the CA that issued it with --ca"
            with pytest.raises(StartupError, match=words):
                connection = LastingConnection(server.address, authority.ca, retry_for_s=0.01)
                async with connected(connection, ClusterOptions()):
                    pass


async def test_a_command_that_calls_a_plaintext_port_with_tls_is_told_so(tmp_path: Path) -> None:
    ca = Authority(tmp_path).ca
    async with serving(GENERATION_SERVICE) as server:
        with pytest.raises(StartupError, match=f"{server.address} speaks no TLS; leave --ca out"):
            async with connected(LastingConnection(server.address, ca, retry_for_s=0.01), ClusterOptions()):
                pass


@pytest.mark.parametrize("first", [0, 1])
async def test_of_several_addresses_the_one_whose_certificate_has_another_name_is_named(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the first in the list, or, where that had been asked first, none."""
    monkeypatch.setattr("random.randrange", lambda count: first)
    authority = Authority(tmp_path)
    async with serving(GENERATION_SERVICE, watched(authority.issue("coordinator.test"))) as server:
        addresses = f"127.0.0.1:1,{server.address}"
        with pytest.raises(StartupError, match=f"^the certificate of {server.address} has not the name 127.0.0.1;"):
            async with connected(LastingConnection(addresses, authority.ca, retry_for_s=0.01), ClusterOptions()):
                pass


def test_what_a_command_waits_for_has_the_systems_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC ends some reports with a status of its own, which is OK."""
    for message in ("TLS failed: certificate has expired: OK", "no connection: certificate has expired"):
        RetryNotices()(Retry("127.0.0.1:1", PeerUnavailable(message), 0.1, 60.0))
    line = "coordinator 127.0.0.1:1 is away (certificate has expired); trying again for up to 60 s"
    assert capsys.readouterr().err.splitlines() == [line, line]


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1", "dns:///localhost", "coordinator.test:", "::1", "2001:db8::5"]
)
def test_an_address_without_a_port_is_named(address: str) -> None:
    """review G6"""
    with pytest.raises(StartupError, match="has no port; give HOST:PORT"):
        LOCAL.check(address)
    result = CliRunner().invoke(app, ["generate", "hello", "--address", address])
    assert isinstance(result.exception, StartupError)
    assert "has no port" in result.exception.message


def test_a_port_that_no_machine_has_is_named() -> None:
    """It was a traceback, and of a gateway the port that is left of it in sixteen bits."""
    with pytest.raises(StartupError, match="has a port beyond 65535; correct it"):
        LOCAL.check("127.0.0.1:99999")
    with pytest.raises(StartupError, match="has a port beyond"):
        LOCAL.check("127.0.0.1:" + "7" * 5000)
    for port in ("70000", "7" * 5000):
        assert CliRunner().invoke(app, ["trace", "--listen", f"127.0.0.1:{port}"]).exit_code == 2


@pytest.mark.parametrize(
    "host", ["foo..bar", ".test", "a" * 64, "b." + "a" * 64 + ".test", "ä" * 60 + ".test", "\u00ad.test"]
)
async def test_a_host_that_no_name_server_could_know_is_named(host: str) -> None:
    """Looked up, it fails by an error of no network: a traceback, and the end of a coordinator's process."""
    trusting = ChannelSecurity(plaintext=True)
    with pytest.raises(StartupError, match="names no host"):
        trusting.check(f"{host}:7700")
    settings = CoordinatorSettings(target=f"{host}:7700", draft="none", plaintext=True, port=0)
    with pytest.raises(StartupError, match="names no host"):
        async with running_coordinator(settings, Instruments(CollectorRegistry())):
            pass


@pytest.mark.parametrize("host", ["localhost", "target.paceline.svc.cluster.local.", "[::1]", "10.0.0.1", "a" * 63])
def test_names_and_addresses_are_hosts(host: str) -> None:
    ChannelSecurity(plaintext=True).check(f"{host}:7700")


@pytest.mark.parametrize("address", ["unix:/run/target..socket", "unix:///run/target.socket"])
def test_a_socket_in_the_file_system_has_no_host(address: str) -> None:
    ChannelSecurity(plaintext=True).check(address)


async def test_a_socket_without_a_coordinator_is_away() -> None:
    """The look whether it speaks TLS ended the command by a traceback."""
    connection = LastingConnection("unix:/run/nobody/is.here", plaintext=True, retry_for_s=0.01)
    with pytest.raises(PeerUnavailable, match="No such file"):
        async with connected(connection, ClusterOptions()):
            pass


async def test_a_coordinator_says_at_once_that_its_target_is_a_draft() -> None:
    """review G6"""
    async with serving(DRAFT_SERVICE) as server:
        settings = CoordinatorSettings(draft="127.0.0.1:1", target=server.address)
        with pytest.raises(
            IncompatiblePair, match=f"{server.address}: what answers is a draft service and not a target service"
        ):
            async with running_coordinator(settings, Instruments(CollectorRegistry())):
                pass


async def test_a_draft_address_that_leads_to_a_target_is_refused_and_not_waited_for() -> None:
    """review G6"""
    async with serving(TARGET_SERVICE) as server:
        remote = RemoteDrafter(open_channel(server.address), 5.0)
        with pytest.raises(IncompatiblePair, match="what answers is a target service and not a draft service"):
            await remote.is_serving(5.0)
        await remote.close()


class Nobody:
    def changed(self, replica: Replica[Remote]) -> None: ...

    def left(self, replica: Replica[Remote]) -> None: ...


class NeverAnswers(FakeVerifier):
    async def is_serving(self, timeout_s: float) -> bool:
        await asyncio.Event().wait()
        raise AssertionError


async def nowhere(address: HostPort) -> set[str]:
    raise OSError("no such name")


async def why_no_target(
    remote: Remote, address: str = "127.0.0.1:1", resolve: Callable[[HostPort], Awaitable[set[str]]] = resolve
) -> str:
    """Return the error of a coordinator whose start times out after its first check."""
    async with background() as tasks:
        targets = Replicas(parse_addresses(address), lambda *_: remote, fits, Nobody(), tasks, resolve)
        await targets.refresh()
        if not isinstance(remote, NeverAnswers):
            await targets.looked()
        with pytest.raises(StartupError) as told:
            await wait_for_target(targets, addresses=address, timeout_s=0)
    return told.value.message.partition("correct --target ")[2]


async def test_a_coordinator_that_calls_a_tls_target_in_plaintext_is_told_of_the_ca(tmp_path: Path) -> None:
    """review G6"""
    async with serving(TARGET_SERVICE, watched(Authority(tmp_path).issue("127.0.0.1"))) as server:
        remote = RemoteVerifier(open_channel(server.address), 5.0)
        said = await why_no_target(remote, server.address)
    assert said == f"({server.address}: it wants TLS; give the CA of its certificate with --models-ca)"


class Describing(TargetServiceServicer):
    """A target that only describes itself."""

    def __init__(self, model: ModelDescription) -> None:
        self._model = model

    async def DescribeTargetModel(
        self, request: target_service_pb2.DescribeTargetModelRequest, context: Context
    ) -> target_service_pb2.DescribeTargetModelResponse:
        return target_service_pb2.DescribeTargetModelResponse(model=model_to_pb(self._model), wire=versions_to_pb())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("max_rows", {"max_rows": -1}),
        ("cache.capacity_bytes", {"cache": CacheDescription(capacity_bytes=-1)}),
        ("compute.core_count", {"compute": ComputeDescription(core_count=-1)}),
        ("", {}),
    ],
)
async def test_a_description_that_cannot_be_true_is_its_services_failure(name: str, wrong: dict[str, Any]) -> None:
    """A cache of negative size failed every request that it was considered for, with a traceback."""
    servicer = Describing(replace(describe("target"), **wrong))  # type: ignore[abstract]
    async with running_server(
        "127.0.0.1", 0, [TARGET_SERVICE], partial(add_TargetServiceServicer_to_server, servicer), grace_s=0
    ) as server:
        remote = RemoteVerifier(open_channel(server.address), 5.0)
        refusal: AbstractContextManager[object] = nullcontext()
        if name:
            refusal = pytest.raises(PeerFailed, match=f"cannot be true: {name} is -1")
        with refusal:
            assert await remote.describe(5.0) == describe("target")
        await remote.close()


async def test_a_coordinator_without_a_target_says_how_each_stands() -> None:
    """A target that was slow to answer, or still loading, was reported as a name that cannot be resolved."""
    draining = FakeVerifier()
    draining.is_draining = True
    gone = FakeVerifier()
    gone.away = PeerUnavailable("nobody is there")
    assert await why_no_target(NeverAnswers()) == "(127.0.0.1:1: it has not answered yet)"
    assert await why_no_target(draining) == "(127.0.0.1:1: it answers that it is not serving)"
    assert await why_no_target(gone) == "(127.0.0.1:1: nobody is there)"
    assert await why_no_target(FakeVerifier(), resolve=nowhere) == "(its name cannot be resolved)"


def test_load_without_a_plotting_library_runs_and_says_that_it_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """review G6"""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    flags = ["--rate", "1", "--requests", "1", "--address", "127.0.0.1:1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["load", *flags])
    assert "no plot will be drawn: this needs matplotlib, which is not installed: pip install" in result.output
    assert "Connection refused" in str(result.exception)
