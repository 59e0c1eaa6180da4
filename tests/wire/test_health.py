"""The standard health service over real gRPC: watchers are told, and keep nobody waiting."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.wire import RunningServer, lasting, open_channel, running_server
from tests.fakes.frames import DATA, END_OF_STREAM, HEADERS, NO_WINDOW, call_of, frame

NAME = "paceline.v1.TargetService"
TIMEOUT_S = 30.0
LONG_S = 3600.0
EMPTY = bytes(5)
"""An empty message with its length before it."""
Status = health_pb2.HealthCheckResponse


@asynccontextmanager
async def serving(grace_s: float = 0.0) -> AsyncIterator[RunningServer]:
    """Serve while the block runs. Raise TimeoutError where the server does not end soon after it."""
    async with asyncio.timeout(TIMEOUT_S):
        async with running_server("127.0.0.1", 0, [NAME], lambda server: None, grace_s=grace_s) as server:
            yield server


@asynccontextmanager
async def health_of(server: RunningServer) -> AsyncIterator[Any]:
    async with open_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


@asynccontextmanager
async def silent_watcher(server: RunningServer) -> AsyncIterator[None]:
    """Watch, and take nothing of what is told."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(call_of(b"/grpc.health.v1.Health/Watch", NO_WINDOW) + frame(DATA, END_OF_STREAM, 1, EMPTY))
        kind = None
        while kind != HEADERS:  # they come with the first status, which waits
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
        yield
    finally:
        writer.transport.abort()


async def test_a_watcher_is_told_the_status_now_and_whenever_it_changes() -> None:
    async with serving() as server, health_of(server) as health:
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", NAME)]
        for is_serving in (False, True, False):
            server.set_serving(is_serving)
            server.set_serving(is_serving)
            for watch in watches:
                assert (await watch.read()).status == (Status.SERVING if is_serving else Status.NOT_SERVING)


async def test_a_service_that_is_not_there_is_unknown_to_watchers_and_not_found_by_checks() -> None:
    async with serving() as server, health_of(server) as health:
        request = health_pb2.HealthCheckRequest(service="another")
        assert (await health.Watch(request).read()).status == Status.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await health.Check(request)
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_that_takes_nothing_keeps_no_change_from_others_and_no_server_from_ending() -> None:
    """Anybody may watch. One who read nothing kept a service from being drained, and so from ending before a kill."""
    async with AsyncExitStack() as outlasting, serving(LONG_S) as server:
        await outlasting.enter_async_context(silent_watcher(server))
        server.set_serving(True)
        async with health_of(server) as health:
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.SERVING
            assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status == Status.SERVING


async def test_watches_and_open_reflections_do_not_use_up_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that balance by health watch each server: each stop took the whole of `--shutdown-grace-s`."""
    monkeypatch.setattr(lasting, "UNHEARD_GRACE_S", 0.01)
    async with AsyncExitStack() as outlasting, serving(LONG_S) as server:
        channel: Any = await outlasting.enter_async_context(open_channel(server.address))
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.NOT_SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection.ServerReflectionInfo()
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert await listing.read()
