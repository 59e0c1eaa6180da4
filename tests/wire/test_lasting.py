"""A server told to stop waits for the calls that it hears, and for no others."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from paceline.wire import lasting
from paceline.wire.lasting import HeardCalls, LastingServer


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

    await calls.intercept_service(handler, cast(Any, None))
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
