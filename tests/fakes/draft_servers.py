"""A fake draft service behind real gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from paceline.wire import Exchanges, ServerOptions, running_server

ServicerT = TypeVar("ServicerT", bound=DraftServiceServicer)


@asynccontextmanager
async def draft_server(
    servicer: ServicerT,
    *,
    port: int = 0,
    grace_s: float = 0,
    options: ServerOptions | None = None,
    exchanges: Exchanges | None = None,
) -> AsyncIterator[tuple[ServicerT, str]]:
    """Serve while the block runs; yield the servicer and its address."""
    async with running_server(
        "127.0.0.1",
        port,
        [],
        lambda server: add_DraftServiceServicer_to_server(servicer, server),
        grace_s=grace_s,
        options=options or ServerOptions(),
        streams=exchanges,
    ) as server:
        yield servicer, server.address
