"""A gRPC server that survives two faults of grpc.aio, both seen with grpcio 1.85.1.

grpc.aio decodes the path of each call as UTF-8 in its accept loop. A path that is not UTF-8 ends the loop and thereby
the server, so anyone who can open a connection can stop it with one frame (found by `benchmarks.fuzz`). grpc.aio then
frees memory of methods registered with gRPC's core. The core later writes to it, which crashes the process. So methods
are not registered, which costs only a look-up, and a failed server is replaced on the same port. Its calls go on.

A call that arrives while a server stops may be neither handled nor refused (seen in two of thirty stops of a
coordinator with a call under way). It would keep the server for the whole grace. So the grace ends with the last call
that reached a handler. Calls of the standard services do not count: watchers of health, and tools that keep a stream
for reflection, stay as long as they are let.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import structlog

from paceline.errors import StartupError
from paceline.wire.handlers import is_own

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
"""Seconds between checks for a failed accept loop, which grpc.aio reports only when asked."""
FAILED_GRACE_S = 600.0
"""Seconds for the remaining calls of a failed server."""
UNHEARD_GRACE_S = 1.0
"""Seconds for gRPC to stop by itself, which it does when no call is under way."""


def without_registration(server: grpc.aio.Server) -> grpc.aio.Server:
    """Keep generated code from registering its methods with the core. Its generic handlers serve the same methods."""
    server.add_registered_method_handlers = lambda service_name, method_handlers: None  # type: ignore[method-assign]
    return server


class HeardCalls(grpc.aio.ServerInterceptor):
    """The calls of own services under way, from gRPC's handing over to the sending of the status."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ended(self) -> None:
        """Wait until no call is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if is_own(handler_call_details.method):
            # grpc.aio runs the whole call in one task.
            task = asyncio.current_task()
            assert task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)


class LastingServer:
    def __init__(
        self,
        make: Callable[[int], tuple[grpc.aio.Server, int]],
        port: int,
        calls: HeardCalls,
        on_failure: Callable[[], None],
    ) -> None:
        """`make` binds a server to a port and returns both; it is called again after a failure, with the same port.

        `calls` sees the calls of all servers made. `on_failure` is called when a server failed, to end whatever would
        keep that server for long.
        """
        self._calls = calls
        self._make = make
        self._on_failure = on_failure
        self._server, self.port = make(port)
        self._failed: dict[grpc.aio.Server, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and give those under way `grace_s` seconds to end."""
        if self._watching:
            self._watching.cancel()
        servers = (self._server, *self._failed)
        unheard = asyncio.create_task(self._end_unheard(servers))
        try:
            await asyncio.gather(*(_end(server, grace_s) for server in servers))
        finally:
            unheard.cancel()

    async def _end_unheard(self, servers: Iterable[grpc.aio.Server]) -> None:
        """Wait until every handled call has ended, then end the unhandled ones. Their callers ask elsewhere."""
        await asyncio.sleep(UNHEARD_GRACE_S)
        await self._calls.ended()
        await asyncio.gather(*(_end(server, 0) for server in servers))

    async def _watch(self) -> None:
        while True:
            try:
                await self._server.wait_for_termination(LOOK_EVERY_S)
            except Exception as error:
                log.error("accepting calls failed; listening anew", error=repr(error))
                await self._replace()

    async def _replace(self) -> None:
        failed = self._server
        self._on_failure()
        ending = asyncio.create_task(_end(failed, FAILED_GRACE_S))
        self._failed[failed] = ending
        ending.add_done_callback(lambda _: self._failed.pop(failed))
        while True:
            try:
                self._server, _ = self._make(self.port)
                break
            except StartupError:  # whatever keeps the port from being bound may pass
                await asyncio.sleep(LOOK_EVERY_S)
        await self._server.start()


async def _end(server: grpc.aio.Server, grace_s: float) -> None:
    try:
        await server.stop(grace_s)
    except Exception:  # the accept loop failed unnoticed; the second stop only waits for the calls
        await server.stop(grace_s)
