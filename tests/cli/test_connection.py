"""The flags with which a command reaches a protected coordinator."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from paceline.cli import generate, load
from paceline.cli.app import app
from paceline.cli.connection import Connection, LastingConnection, connected
from paceline.cli.options import draft_limit
from paceline.cli.run import command as run
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.errors import InvalidRequest, PacelineError, PeerUnavailable, StartupError, Unauthenticated
from paceline.process.cluster_plan import ClusterOptions
from paceline.security.channels import channel_security
from paceline.types import GenerationRequest, TokenIds
from tests.certificates import Authority
from tests.coordinators import fake_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation
from tests.manifests import of_kind, resources

PROMPT = (5, 6, 7)


async def answer(connection: Connection) -> list[int]:
    async with connected(connection, ClusterOptions()) as (client, cluster):
        assert cluster.batch_size
        return (await client.complete(GenerationRequest(TokenIds(PROMPT), 10))).token_ids


async def test_a_command_shows_certificate_and_token_and_what_is_missing_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own, client = authority.issue("127.0.0.1"), authority.issue("client.test")
    (tmp_path / "tokens").write_text("a-token")
    settings: dict[str, Any] = {
        "tls_certificate": own.certificate,
        "tls_key": own.key,
        "tls_client_ca": authority.ca,
        "token_file": tmp_path / "tokens",
    }
    async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), **settings) as server:
        whole = Connection(server.address, authority.ca, tmp_path / "tokens", client.certificate, client.key)
        assert await answer(whole) == continuation(PROMPT, 10)
        refused: list[tuple[Connection, type[PacelineError]]] = [
            (replace(whole, token_file=None), Unauthenticated),
            (replace(whole, certificate=None, key=None), PeerUnavailable),
            (replace(whole, ca=None, certificate=None, key=None), StartupError),
        ]
        for connection, kind in refused:
            with pytest.raises(kind):
                await answer(connection)


@pytest.mark.review
async def test_clients_reach_a_coordinator_of_a_cluster_by_its_names_and_through_a_tunnel(tmp_path: Path) -> None:
    """Review D5: the certificate had no name of a tunnel's end, and no flag named another. It is issued as rendered."""
    authority = Authority(tmp_path)
    names = of_kind(resources("tls"), "Certificate")["paceline-coordinator"]["spec"]["dnsNames"]
    own = authority.issue(*names)
    settings: dict[str, Any] = {"tls_certificate": own.certificate, "tls_key": own.key}
    async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), **settings) as server:
        direct = Connection(server.address, authority.ca)
        forwarded = replace(direct, address=server.address.replace("127.0.0.1", "localhost"))
        named = [
            replace(direct, authority=f"paceline-coordinator{rest}") for rest in ("", ".paceline", ".paceline.svc")
        ]
        for connection in (forwarded, *named):
            assert await answer(connection) == continuation(PROMPT, 10)
        for connection in (direct, replace(direct, authority="paceline-target")):
            with pytest.raises(StartupError, match="has not the name .* --authority"):
                await answer(connection)


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        (Connection(ca=Path("ca.pem")), "--ca is for a coordinator that runs already; give its --address"),
        (Connection(token_file=Path("token")), "--token-file is for"),
        (Connection(authority="localhost"), "--authority is for"),
        (Connection("10.0.0.7:7700"), "10.0.0.7:7700 is not on this machine"),
        (Connection("127.0.0.1:1", certificate=Path("c")), "a certificate and its key go together"),
        (Connection("127.0.0.1:1", certificate=Path("c"), key=Path("k")), "give the CA"),
        (Connection("127.0.0.1:1", ca=Path("/nowhere/ca.pem")), "/nowhere/ca.pem cannot be used"),
        (Connection("127.0.0.1:1", token_file=Path("/dev/null")), "holds no token"),
    ],
)
async def test_flags_that_do_not_go_together_are_named(connection: Connection, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        await answer(connection)


@pytest.mark.review
@pytest.mark.parametrize(
    "flags", [["--batch-size", "4"], ["--target-model", "builtin:target"], ["--draft-count", "auto"], ["--lanes", "1"]]
)
@pytest.mark.parametrize("command", [["generate", "hello"], ["load", "--rate", "1"]])
def test_flags_of_services_of_ones_own_are_refused_with_an_address(command: list[str], flags: list[str]) -> None:
    """review G9"""
    result = CliRunner().invoke(app, [*command, "--address", "127.0.0.1:1", *flags])
    assert isinstance(result.exception, StartupError)
    assert f"{flags[0]} is for services of one's own" in result.exception.message


@pytest.mark.review
async def test_a_draft_count_with_an_address_is_asked_of_requests() -> None:
    """review G9"""
    assert draft_limit(True, ClusterOptions(draft_count="2")) == 2
    assert draft_limit(False, ClusterOptions(draft_count="2")) == 0
    async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), draft_count=5) as server:
        async with connected(Connection(server.address), ClusterOptions(draft_count="2")) as (_, cluster):
            assert cluster.draft_count == 5
        with pytest.raises(InvalidRequest, match="--draft-count 9: the coordinator drafts 5 tokens a round at most"):
            async with connected(Connection(server.address), ClusterOptions(draft_count="9")):
                pass


@pytest.mark.parametrize("speculation", ["--speculation", "--no-speculation"])
@pytest.mark.parametrize("count", ["abc", "-3", "1.5", "65", "1" * 5000])
@pytest.mark.parametrize("command", [["generate", "hello"], ["load", "--rate", "1"]])
def test_what_is_no_draft_count_is_refused_before_anything_is_asked(
    command: list[str], count: str, speculation: str
) -> None:
    """A coordinator that chooses its own count ignored such counts silently."""
    flags = ["--address", "127.0.0.1:1", "--draft-count", count, speculation]
    result = CliRunner().invoke(app, [*command, *flags])
    assert isinstance(result.exception, InvalidRequest)
    assert f"--draft-count is '{count}'; give 0 to 64, or auto" in result.exception.message


async def test_a_token_leaves_the_machine_in_plaintext_only_where_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    with pytest.raises(StartupError, match="is not on this machine"):
        Client("coordinator.test:7700", security=channel_security(token_file=tmp_path / "token"))
    asked = channel_security(token_file=tmp_path / "token", plaintext=True)
    asked.check("coordinator.test:7700")
    assert asked.metadata() == (("authorization", "Bearer a-token"),)


@pytest.mark.parametrize("authority", [" ", "\udcff", "é", "a\nb"])
def test_an_authority_that_no_certificate_names_is_refused(authority: str) -> None:
    """gRPC ended the command by a traceback."""
    with pytest.raises(StartupError, match="authority is .*; give the name"):
        channel_security(authority=authority)


def test_the_token_shows_in_no_representation(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    own = Authority(tmp_path).issue("client.test")
    security = channel_security(
        ca=tmp_path / "ca.pem", certificate=own.certificate, key=own.key, token_file=tmp_path / "token"
    )
    assert security.certificates
    assert "a-token" not in repr(security)
    assert "PRIVATE KEY" not in repr((security, security.certificates.value()))


@pytest.mark.review
async def test_a_command_says_soon_that_it_waits_for_its_coordinator_and_gives_up_when_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Review C13: the longest outage could not be set, and nobody was told of an outage."""
    with pytest.raises(PeerUnavailable, match=r"127\.0\.0\.1:1 could not be used for 0\.3 s"):
        await answer(LastingConnection("127.0.0.1:1", retry_for_s=0.3))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("coordinator 127.0.0.1:1 is away (")
    assert line.endswith("); trying again for up to 0 s")


def test_only_commands_that_wait_take_the_time_to_wait() -> None:
    """Calls of `load` are made once, because it measures single calls."""
    for command, waits in ((generate.command, True), (run.command, True), (load.command, False)):
        assert ("retry_for_s" in inspect.signature(command).parameters) is waits
    assert Connection("127.0.0.1:1").retries == NO_RETRIES
    assert LastingConnection("127.0.0.1:1").retries == RetryPolicy(120)
