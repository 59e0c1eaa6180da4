"""Channels and servers: how a peer is found, and what a server says of itself."""

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import paceline
from paceline.errors import StartupError
from paceline.wire import ServerOptions, channel, open_channel, running_server
from paceline.wire.ports import Listening, bound
from paceline.wire.reopening import ReopeningChannel
from paceline.wire.server import LIVENESS_NAME
from tests.fakes.proxy import silent_peer


def test_grpc_knows_every_option_that_is_set() -> None:
    """It takes others in silence: servers ended connections for pings that they were to allow."""
    found = find_spec("grpc._cython.cygrpc")
    assert found and found.origin
    library = Path(found.origin).read_bytes()
    sources = [one.read_text() for one in Path(paceline.__file__).parent.rglob("*.py")]
    names = {name for text in sources for name in re.findall(r'"(grpc\.[a-z0-9_.]+)"', text)}
    assert len(names) > 10
    assert [name for name in sorted(names) if name.encode() + b"\0" not in library] == []


async def test_a_connection_that_is_not_answered_is_given_up_before_calls_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gRPC's default it was waited for 20 s, and a client went to the next coordinator only then."""
    monkeypatch.setattr(channel, "CONNECT_MS", 100)
    async with silent_peer() as address, open_channel(address) as calling:
        stub: Any = health_pb2_grpc.HealthStub(calling)
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=15)
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_calls_to_this_machine_pass_no_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's `http_proxy` took the calls of `paceline demo` to its own services."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with running_server("127.0.0.1", 0, [], lambda server: None, grace_s=0) as server:
        port = server.address.rpartition(":")[2]
        async with open_channel(f"{host}:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_server_listens_at_an_address_of_ipv6_however_it_is_written(host: str) -> None:
    """Settings took it without brackets, and gRPC did not, which showed once the model was loaded."""
    try:
        bound(Listening("--port", host, 0)).close()
    except StartupError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    options = ServerOptions(health_port=0)
    async with running_server(host, 0, [], lambda server: None, grace_s=0, options=options) as server:
        assert server.health_address
        for address in (server.address, server.health_address):
            assert address.startswith("[::1]:")
            async with open_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_address_of_ipv6_is_called_whether_it_has_brackets_or_not() -> None:
    """It was taken for this machine's, so in plaintext, and another host was called, at port 443."""
    try:
        bound(Listening("--port", "::1", 0)).close()
    except StartupError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    async with (
        running_server("::1", 0, [], lambda server: None, grace_s=0) as server,
        open_channel(server.address.replace("[", "").replace("]", "")) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_socket_in_the_file_system_is_called_in_plaintext_without_asking(tmp_path: Path) -> None:
    """It is on this machine; an error said that it was not."""
    address = f"unix:{tmp_path / 'socket'}"
    server = grpc.aio.server()
    server.add_insecure_port(address)
    await server.start()
    async with open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    await server.stop(0)


@pytest.mark.parametrize("can_serve", [True, False])
async def test_a_server_is_alive_whether_it_can_serve_or_not(can_serve: bool) -> None:
    """Kubernetes restarted coordinators without a target, and the requests that waited in them were lost."""
    options, statuses = ServerOptions(health_port=0), {}
    async with running_server("127.0.0.1", 0, [], lambda server: None, grace_s=0, options=options) as server:
        server.set_serving(can_serve)
        assert server.health_address
        async with open_channel(server.health_address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", LIVENESS_NAME):
                statuses[name] = (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)).status
    known = health_pb2.HealthCheckResponse
    assert statuses == {"": known.SERVING if can_serve else known.NOT_SERVING, LIVENESS_NAME: known.SERVING}


class Opened:
    def __init__(self) -> None:
        self.is_closed = False

    async def close(self, grace: float | None = None) -> None:
        self.is_closed = True

    def get_state(self, try_to_connect: bool = False) -> None:
        return None

    def unary_unary(self, method: str, **named: Any) -> Any:
        assert not self.is_closed, "gRPC may crash here"
        return lambda request: Made()


class Made:
    def add_done_callback(self, done: object) -> None:
        pass


def reopening(current: list[str]) -> tuple[ReopeningChannel[str], list[Opened]]:
    """Return a channel that opens another when the current one changes, and those that it has opened."""
    made: list[Opened] = []

    def open_one(opening: str) -> Opened:
        made.append(Opened())
        return made[-1]

    return ReopeningChannel(lambda: current[0], open_one), made  # type: ignore[arg-type]


async def test_closing_right_after_reopening_closes_both_channels() -> None:
    current = ["before"]
    channel, made = reopening(current)
    current[0] = "after"
    channel.get_state()
    await channel.close()
    assert [one.is_closed for one in made] == [True, True]


async def test_a_closed_channel_makes_no_call_and_opens_no_other() -> None:
    """The process could crash, as a coordinator with TLS where it freed sequences at a target that had just left."""
    current = ["before"]
    channel, made = reopening(current)
    call = channel.unary_unary("/paceline.v1.TargetService/DescribeTargetModel")
    assert isinstance(call("request"), Made)
    await channel.close()
    for current[0] in ("before", "after"):
        with pytest.raises(grpc.aio.UsageError):
            call("request")
        channel.get_state()
    assert [one.is_closed for one in made] == [True]
