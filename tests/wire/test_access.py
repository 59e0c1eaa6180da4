"""Permissions of callers: tokens, descriptions, reflection; no secret is written anywhere."""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.config import CoordinatorSettings
from coordinator.security import clients_options
from coordinator.serving import running_coordinator
from paceline.client import NO_RETRIES, Client
from paceline.codec.status import error_from_pb
from paceline.errors import PacelineError, PermissionDenied, StartupError, Unauthenticated
from paceline.process.instruments import Instruments
from paceline.security.channels import channel_security
from paceline.security.files import WatchedFiles
from paceline.types import GenerationRequest, ReplicaState, TokenIds
from paceline.wire import open_channel
from tests.coordinators import fake_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation

PROMPT = (5, 6, 7)
REQUEST = GenerationRequest(TokenIds(PROMPT), 10)
ANSWER = continuation(PROMPT, 10)
TIMEOUT_S = 30.0
RIGHT, WRONG = "right-token-of-a-client", "wrong-token-of-a-stranger"


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[str]:
    async with fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry(), **settings) as server:
        yield server.address


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"first-token\n\n  {RIGHT}  \nlast-token")
    return path


def replace_file(path: Path, content: str | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_text(content)


def token_client(address: str, tmp_path: Path, token: str) -> Client:
    (tmp_path / "token").write_text(token + "\n")
    return Client(address, NO_RETRIES, security=channel_security(token_file=tmp_path / "token"))


@pytest.mark.parametrize("token", ["first-token", RIGHT, "last-token"])
async def test_any_token_of_the_file_lets_in(token: str, token_file: Path, tmp_path: Path) -> None:
    async with served(token_file=token_file) as address, token_client(address, tmp_path, token) as client:
        assert (await client.complete(REQUEST)).token_ids == ANSWER
        assert (await client.describe()).batch_size


@pytest.mark.parametrize("token", [WRONG, RIGHT[:-1], RIGHT + "x", RIGHT.upper()])
async def test_a_wrong_token_is_refused_for_every_method(token: str, token_file: Path, tmp_path: Path) -> None:
    async with served(token_file=token_file) as address, token_client(address, tmp_path, token) as client:
        for call in (client.complete(REQUEST), client.describe()):
            with pytest.raises(Unauthenticated, match="authorization: Bearer TOKEN"):
                await call


async def test_no_token_is_refused_and_health_checks_need_none(token_file: Path) -> None:
    async with served(token_file=token_file) as address, Client(address, NO_RETRIES) as client:
        with pytest.raises(Unauthenticated):
            await client.complete(REQUEST)
        async with open_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


@pytest.mark.parametrize("value", [RIGHT, f"Basic {RIGHT}", "Bearer", "Bearer ", "", f"Bearer {RIGHT} {RIGHT}"])
async def test_only_a_bearer_token_is_one(value: str, token_file: Path) -> None:
    async with served(token_file=token_file) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel, (("authorization", value),))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_are_taken_in_and_out_while_the_service_runs(token_file: Path, tmp_path: Path) -> None:
    async with served(token_file=token_file) as address, token_client(address, tmp_path, RIGHT) as client:
        assert (await client.complete(REQUEST)).token_ids == ANSWER
        replace_file(token_file, "another-token\n")
        with pytest.raises(Unauthenticated):
            await client.complete(REQUEST)
        replace_file(tmp_path / "token", "another-token")
        assert (await client.complete(REQUEST)).token_ids == ANSWER


@pytest.mark.review
@pytest.mark.parametrize("content", [None, "", f"Schlüssel {RIGHT}"], ids=["deleted", "emptied", "wrong"])
async def test_a_token_file_that_cannot_be_used_any_more_revokes_its_tokens(
    content: str | None, token_file: Path, tmp_path: Path
) -> None:
    """Review C15: tokens of a deleted file stayed valid."""
    async with served(token_file=token_file) as address, token_client(address, tmp_path, RIGHT) as client:
        assert (await client.complete(REQUEST)).token_ids == ANSWER
        replace_file(token_file, content)
        with capture_logs() as lines:
            for call in (client.complete(REQUEST), client.describe()):
                with pytest.raises(Unauthenticated):
                    await call
        assert [line["log_level"] for line in lines if "no longer holds" in line["event"]] == ["error"]
        replace_file(token_file, RIGHT)
        assert (await client.complete(REQUEST)).token_ids == ANSWER


@pytest.mark.parametrize("otherwise", ["", None])
def test_a_file_that_is_made_readable_later_is_read_then(otherwise: str | None, token_file: Path) -> None:
    """It was not read again until somebody wrote to it: nobody was let in, or what it had held stayed in use."""

    def read() -> str:  # root may read whatever the mode says
        if not token_file.stat().st_mode & 0o400:
            raise PermissionError(f"{token_file} may not be read")
        return token_file.read_text()

    watched = WatchedFiles("tokens", [token_file], read, otherwise=otherwise)
    held = watched.value()
    token_file.write_text("new-token")
    token_file.chmod(0o000)
    assert watched.value() == (held if otherwise is None else otherwise)
    change_mode(token_file, 0o600)
    assert watched.value() == "new-token"


@pytest.mark.parametrize("otherwise", ["", None])
def test_a_file_that_the_system_could_not_open_for_a_while_is_read_then(
    otherwise: str | None, token_file: Path
) -> None:
    """With too many open files at the moment of a change nobody was let in any more, until the next change."""
    is_full = False

    def read() -> str:
        if is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return token_file.read_text()

    watched = WatchedFiles("tokens", [token_file], read, otherwise=otherwise)
    for token in ("new-token", "newer-token"):
        held = watched.value()
        token_file.write_text(token)
        is_full = True
        with capture_logs() as lines:
            for _ in range(3):
                assert watched.value() == (held if otherwise is None else otherwise)
        assert len(lines) == 1
        is_full = False
        assert watched.value() == token


def test_a_file_that_was_away_and_is_back_unchanged_is_read_again(token_file: Path) -> None:
    """Nobody was let in after its folder had been moved away and back, until somebody wrote to it."""
    watched = WatchedFiles("tokens", [token_file], token_file.read_text, otherwise="")
    held, elsewhere = watched.value(), token_file.with_name("elsewhere")
    token_file.rename(elsewhere)
    assert watched.value() == ""
    elsewhere.rename(token_file)
    assert watched.value() == held


def test_a_file_that_was_written_with_the_time_of_the_one_before_is_read(token_file: Path) -> None:
    watched = WatchedFiles("tokens", [token_file], token_file.read_text)
    times = token_file.stat()
    token_file.write_text(token_file.read_text().replace(RIGHT, WRONG.replace("stranger", "client")))
    assert len(token_file.read_text()) == times.st_size
    os.utime(token_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    change_mode(token_file, 0o600)
    assert RIGHT not in watched.value()


def change_mode(path: Path, mode: int) -> None:
    """Change it at another time than the last change: file systems have ticks of some milliseconds."""
    before_ns = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before_ns:
        path.chmod(mode)


@pytest.mark.review
async def test_who_shows_a_token_is_not_told_where_the_models_are(token_file: Path, tmp_path: Path) -> None:
    """Review C15"""
    async with served(token_file=token_file) as address, token_client(address, tmp_path, RIGHT) as client:
        cluster = await client.describe()
        assert [(one.address, one.state) for one in (*cluster.targets, *cluster.drafts)] == [("", ReplicaState.UP)] * 2
    async with served() as address, Client(address) as client:
        assert [one.address for one in (await client.describe()).targets] == ["target:0"]


@pytest.mark.parametrize("content", [b"", b" \n ", "Schlüssel".encode()])
def test_a_token_file_without_a_usable_token_is_refused_at_start(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(content)
    settings = CoordinatorSettings(draft="unused:1", target="unused:1", token_file=tmp_path / "tokens")
    with pytest.raises(StartupError, match="--token-file: .*tokens") as refused:
        clients_options(settings)
    assert "Schl" not in refused.value.message


async def test_a_coordinator_with_a_wrong_token_file_ends_before_it_waits_for_a_target(tmp_path: Path) -> None:
    settings = CoordinatorSettings(
        draft="127.0.0.1:1", target="127.0.0.1:1", token_file=tmp_path / "none", startup_timeout_s=1000
    )
    with pytest.raises(StartupError, match="--token-file"):
        async with running_coordinator(settings, Instruments(CollectorRegistry())):
            pass


async def test_a_refused_call_writes_no_token_and_no_prompt(token_file: Path, tmp_path: Path) -> None:
    async with served(token_file=token_file) as address, token_client(address, tmp_path, WRONG) as client:
        with capture_logs() as lines, pytest.raises(Unauthenticated) as refused:
            await client.complete(REQUEST)
    (line,) = lines
    assert line["reason"] == "UNAUTHENTICATED"
    assert line["method"] == "/paceline.v1.GenerationService/GenerateText"
    assert "127.0.0.1" in line["peer"]
    for secret in (WRONG, RIGHT, "first-token", "5, 6, 7"):
        assert secret not in f"{lines} {refused.value.message} {refused.value.metadata}"


async def test_descriptions_can_be_switched_off() -> None:
    async with served(describe=False) as address, Client(address) as client:
        with pytest.raises(PermissionDenied, match="--describe false"):
            await client.describe()
        assert (await client.complete(REQUEST)).token_ids == ANSWER


async def reflected(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> set[str]:
    # With one message the bytes equal those of the method's own stub, but that stub reports INTERNAL if the call
    # ends before it has sent the message.
    ask: Any = channel.unary_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask(reflection_pb2.ServerReflectionRequest(list_services=""), metadata=metadata, timeout=TIMEOUT_S)
    return {one.name async for response in call for one in response.list_services_response.service}


async def test_reflection_can_be_switched_off_and_wants_a_token_where_calls_do(token_file: Path) -> None:
    async with served(reflection=False) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with served(token_file=token_file) as address, open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "paceline.v1.GenerationService" in await reflected(channel, (("authorization", f"bearer {RIGHT}"),))


async def test_who_may_not_call_is_told_so_before_the_request_is_parsed(token_file: Path) -> None:
    async with served(token_file=token_file) as address, open_channel(address) as channel:
        call: Any = channel.unary_stream("/paceline.v1.GenerationService/GenerateText")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call(b"\xff no message", timeout=TIMEOUT_S):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_a_proxys_refusal_is_one_too(kind: type[PacelineError]) -> None:
    refused = error_from_pb(status_pb2.Status(code=kind.code.value[0], message="no"))
    assert type(refused) is kind
