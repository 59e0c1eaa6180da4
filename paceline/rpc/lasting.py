"""A gRPC server that goes on where grpc.aio gives up.

In the loop that accepts calls, grpc.aio reads the path of a call as UTF-8. One that is not ends that loop and with it
the server: a single frame from anyone who can open a connection. (Seen with grpcio 1.85.1, found by `benchmarks.fuzz`.)
What it then frees of methods registered with gRPC's core the core writes to later, which crashes the process.

So no methods are registered, which only saves a look-up, and a server that failed has a successor on the same port;
calls under way go on.
"""

import asyncio
from collections.abc import Callable

import grpc
import structlog

from paceline.errors import StartupError

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
"""grpc.aio tells of a failed loop to those who ask only."""
FAILED_GRACE_S = 600.0
"""For the calls of a server that accepts no more."""


def without_registration(server: grpc.aio.Server) -> grpc.aio.Server:
    """Keep generated code from registering its methods with the core: the generic handlers it adds too serve them."""
    server.add_registered_method_handlers = lambda service_name, method_handlers: None  # type: ignore[method-assign]
    return server


class LastingServer:
    def __init__(
        self, make: Callable[[int], tuple[grpc.aio.Server, int]], port: int, on_failure: Callable[[], None]
    ) -> None:
        """`make` returns a server bound to a port, and that port; it is asked for it again when the server failed.

        `on_failure` is called then: it may end what else would keep the failed server for long.
        """
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
        await asyncio.gather(*(_end(server, grace_s) for server in (self._server, *self._failed)))

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
