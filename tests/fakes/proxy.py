"""A TCP proxy between two services whose connections a test can cut, stall and delay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards bytes both ways while `flowing`; otherwise it holds them, like a network that lost its route."""

    def __init__(self, address: str) -> None:
        self.lead_to(address)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""
        self.refuses = False
        """True if new connections are closed at once."""
        self.connection_count = 0
        """Connections let through; from then on `cut` breaks them."""
        self.cut_count = 0

    def lead_to(self, address: str) -> None:
        """Forward new connections to this address from now on."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)

    def cut(self) -> None:
        self.cut_count += 1
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Hold all bytes from now on; connections stay."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        try:
            other_reader, other_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, other_writer}
        self.connection_count += 1
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while content := await source.read(CHUNK_BYTES):
                await self._flowing.wait()
                sink.write(content)
                await sink.drain()
        self._writers.discard(sink)
        sink.transport.abort()

    async def close(self) -> None:
        self.flow()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running_proxy(address: str) -> AsyncIterator[Proxy]:
    """Forward a free port of this machine to `address`; yield the proxy."""
    proxy = Proxy(address)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
