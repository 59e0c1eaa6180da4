"""A gRPC server that goes on where grpc.aio gives up.

In the loop that accepts calls, grpc.aio reads the path of a call as UTF-8. One that is not ends that loop and with it
the server: a single frame from anyone who can open a connection. (Seen with grpcio 1.85.1, found by `benchmarks.fuzz`.)
What it then frees of methods registered with gRPC's core the core writes to later, which crashes the process.

So no methods are registered, which only saves a look-up, and a server that failed has a successor on the same port;
calls under way go on.

A call that comes as a server stops may be neither heard nor refused (seen in two of thirty stops of a coordinator with
a call under way, grpcio 1.85.1). It would wait, and keep the server, for all of the grace. So the grace ends with the
last call that is heard.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import structlog

from paceline.errors import StartupError

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
"""grpc.aio tells of a failed loop to those who ask only."""
FAILED_GRACE_S = 600.0
"""For the calls of a server that accepts no more."""
UNHEARD_GRACE_S = 1.0
"""For gRPC to end by itself, as it does where no call is under way, heard or not."""


def without_registration(server: grpc.aio.Server) -> grpc.aio.Server:
    """Keep generated code from registering its methods with the core: the generic handlers it adds too serve them."""
    server.add_registered_method_handlers = lambda service_name, method_handlers: None  # type: ignore[method-assign]
    return server


class HeardCalls(grpc.aio.ServerInterceptor):
    """The calls under way, from where gRPC hands one over to where its status is sent."""

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
        # The whole call is one task of grpc.aio's.
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
        """`make` returns a server bound to a port, and that port; it is asked for it again when the server failed.

        `calls` sees the calls of all those servers. `on_failure` is called when one failed: it may end what else would
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
        """Accept no more calls; those under way have so long to end."""
        if self._watching:
            self._watching.cancel()
        servers = (self._server, *self._failed)
        unheard = asyncio.create_task(self._end_unheard(servers))
        try:
            await asyncio.gather(*(_end(server, grace_s) for server in servers))
        finally:
            unheard.cancel()

    async def _end_unheard(self, servers: Iterable[grpc.aio.Server]) -> None:
        """Wait until no call is under way, then end those that nobody heard: their callers ask elsewhere."""
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
            except StartupError:  # whatever keeps it from listening where it did: it may pass
                await asyncio.sleep(LOOK_EVERY_S)
        await self._server.start()


async def _end(server: grpc.aio.Server, grace_s: float) -> None:
    try:
        await server.stop(grace_s)
    except Exception:  # raised by a loop that failed unseen; from then on there is only its calls' end to wait for
        await server.stop(grace_s)
