"""Connections of strangers: a real call's recorded bytes, sent again broken, and noise.

gRPC itself answers these or hangs up. The service must continue, which the arena checks.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from paceline.wire import open_channel
from tests.fakes.frames import PREFACE
from tests.fuzzing.calls import METHODS, Call, send
from tests.fuzzing.messages import mutated

READ_BYTES = 1 << 16
QUIET_TURNS = 20
"""Turns of the loop for a server's answer before the stranger hangs up."""


async def record_call(address: str, call: Call) -> bytes:
    """Return the bytes that a client sends over its connection for one call."""
    host, _, port = address.rpartition(":")
    sent = bytearray()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        with suppress(OSError):
            while content := await reader.read(READ_BYTES):
                if kept is not None:
                    kept += content
                writer.write(content)
                await writer.drain()
        writer.transport.abort()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(forward(reader, other_writer, sent), forward(other_reader, writer, None))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        own_port = server.sockets[0].getsockname()[1]
        async with open_channel(f"127.0.0.1:{own_port}") as channel:
            await send(channel, call)
    await server.wait_closed()
    return bytes(sent)


@st.composite
def streams(draw: Callable[[st.SearchStrategy[Any]], Any], recorded: tuple[bytes, ...]) -> bytes:
    """Draw a connection's first bytes: noise, noise after HTTP/2's preface, or a broken recorded call."""
    kind = draw(st.sampled_from(("noise", "preface", "call", "call", "call")))
    if kind != "call":
        return (PREFACE if kind == "preface" else b"") + bytes(draw(st.binary(max_size=200)))
    return mutated(draw, draw(st.sampled_from(recorded)), 4)


async def connect_and_send(address: str, content: bytes) -> None:
    """Open a connection, send the bytes, wait a little, and hang up silently."""
    host, _, port = address.rpartition(":")
    with suppress(OSError):  # of a service that hangs up first, or does not listen for a moment
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(content)
        await writer.drain()
        for _ in range(QUIET_TURNS):
            await asyncio.sleep(0)
        writer.transport.abort()


DESCRIBING = tuple(Call(method, b"") for method in METHODS if method.name.startswith("Describe"))
"""A call without preconditions for each service."""
