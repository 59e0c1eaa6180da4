"""A TCP proxy between two services: a test can cut and stall its connections, and it can be as far away as wanted."""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 16
MOST_CHUNKS = 256
"""Most pieces under way in one direction; then the sender has to wait."""

UnderWay = asyncio.Queue[tuple[float, bytes]]
"""Pieces with the times of the loop's clock when they are to arrive; an empty one is the end."""


class Proxy:
    """Forwards bytes both ways while `flowing`; otherwise it holds them, like a network that lost its route.

    Bytes take `delay_s` each way, as far as the loop's timers are exact. Any number of them are under way at once.
    """

    def __init__(self, address: str, delay_s: float = 0.0) -> None:
        self.lead_to(address)
        self._delay_s = delay_s
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
        self.chunk_count = 0
        """Pieces that came from either side."""

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
            under_way = UnderWay(MOST_CHUNKS)
            self._start(self._deliver(under_way, sink, self._start(self._take(source, under_way))))

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _take(self, source: asyncio.StreamReader, under_way: UnderWay) -> None:
        now_s = asyncio.get_running_loop().time
        with suppress(OSError):
            while content := await source.read(CHUNK_BYTES):
                self.chunk_count += 1
                await under_way.put((now_s() + self._delay_s, content))
        await under_way.put((0.0, b""))

    async def _deliver(self, under_way: UnderWay, sink: asyncio.StreamWriter, taking: asyncio.Task[None]) -> None:
        now_s = asyncio.get_running_loop().time
        with suppress(OSError):
            while (piece := await under_way.get())[1]:
                arrives_s, content = piece
                await asyncio.sleep(arrives_s - now_s())
                await self._flowing.wait()
                sink.write(content)
                await sink.drain()
        taking.cancel()
        self._writers.discard(sink)
        sink.transport.abort()

    async def close(self) -> None:
        self.flow()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running_proxy(address: str, delay_s: float = 0.0) -> AsyncIterator[Proxy]:
    """Forward a free port of this machine to `address`; yield the proxy."""
    proxy = Proxy(address, delay_s)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()


@asynccontextmanager
async def silent_peer() -> AsyncIterator[str]:
    """Take connections and say nothing on them, like a machine that hangs. Yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel takes what nobody accepts
        yield f"127.0.0.1:{listening.getsockname()[1]}"
