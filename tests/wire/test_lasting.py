"""A server outlasts a path that is not UTF-8; told to stop, it waits for the calls that it hears, and for no others."""

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from paceline.codec.names import VERIFY_TOKENS
from paceline.wire import RunningServer, ServerOptions, lasting, open_channel, running_server
from paceline.wire.lasting import HeardCalls, LastingServer
from tests.fakes.frames import call_of
from tests.waits import until

TIMEOUT_S = 60.0
Status = health_pb2.HealthCheckResponse


class WaitingServer:
    """Like grpc.aio's server when a call comes with the stop: neither heard nor refused, it uses up the grace."""

    def __init__(self) -> None:
        self._is_over = asyncio.Event()

    async def start(self) -> None: ...

    async def wait_for_termination(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    async def stop(self, grace_s: float) -> None:
        if not grace_s:
            self._is_over.set()
        await self._is_over.wait()


async def heard(calls: HeardCalls, until: asyncio.Event) -> None:
    """Make a running call, in its own task as in grpc.aio."""

    async def handler(details: grpc.HandlerCallDetails) -> None: ...

    await calls.intercept_service(handler, cast(Any, SimpleNamespace(method=VERIFY_TOKENS)))
    await until.wait()


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> tuple[HeardCalls, LastingServer]:
    monkeypatch.setattr(lasting, "UNHEARD_GRACE_S", 0.0)
    calls = HeardCalls()
    server = cast(grpc.aio.Server, WaitingServer())
    return calls, LastingServer(lambda port: (server, port), 7700, calls, lambda: None)


async def test_a_call_that_nobody_hears_keeps_no_server_from_ending(
    stopping: tuple[HeardCalls, LastingServer],
) -> None:
    _, server = stopping
    await server.start()
    await server.stop(grace_s=1e9)


async def test_a_call_that_is_heard_has_its_grace(stopping: tuple[HeardCalls, LastingServer]) -> None:
    calls, server = stopping
    is_answered = asyncio.Event()
    call = asyncio.create_task(heard(calls, is_answered))
    await server.start()
    stop = asyncio.create_task(server.stop(grace_s=1e9))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not call.done()
    assert not stop.done()
    is_answered.set()
    await call
    await stop


async def break_listener(address: str) -> None:
    """Call a path that is not UTF-8, and wait until the server has listened anew."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    with capture_logs() as logs:
        writer.write(call_of(b"/grpc.health.v1.Health/\xff\xfe"))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await until(lambda: any("listening anew" in line["event"] for line in logs))
        finally:
            writer.transport.abort()


def address_of(server: RunningServer, port: str) -> str:
    assert server.health_address
    return {"--port": server.address, "--health-port": server.health_address}[port]


PORTS = pytest.mark.parametrize("port", ["--port", "--health-port"])


@PORTS
async def test_a_path_that_is_no_text_keeps_no_later_caller_out(port: str) -> None:
    """One frame ended the health port until the process ended, and the probes ended the process."""
    options = ServerOptions(health_port=0)
    async with running_server("127.0.0.1", 0, [], lambda server: None, grace_s=0, options=options) as server:
        server.set_serving(True)
        address = address_of(server, port)
        for _ in range(2):
            await break_listener(address)
            async with open_channel(address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                check = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
                assert (await check).status == Status.SERVING


@PORTS
async def test_a_call_under_way_outlasts_a_path_that_is_no_text_and_keeps_no_server_from_ending(port: str) -> None:
    options = ServerOptions(health_port=0)
    async with AsyncExitStack() as opened:
        async with running_server("127.0.0.1", 0, [], lambda server: None, grace_s=0, options=options) as server:
            address = address_of(server, port)
            stub: Any = health_pb2_grpc.HealthStub(await opened.enter_async_context(open_channel(address)))
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert (await watch.read()).status == Status.NOT_SERVING
            await break_listener(address)
            server.set_serving(True)
            assert (await watch.read()).status == Status.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await watch.read() is not grpc.aio.EOF:
                pass
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
