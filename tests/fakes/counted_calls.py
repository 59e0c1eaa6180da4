"""A service that follows orders in its calls, a counter of its calls, and calls to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from paceline.errors import InvalidRequest
from paceline.observe.metrics import CallCounter
from paceline.v1 import draft_service_pb2 as draft_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from paceline.v1.target_service_pb2_grpc import (
    TargetServiceServicer,
    TargetServiceStub,
    add_TargetServiceServicer_to_server,
)
from paceline.wire import open_channel, running_server


class Obedient(TargetServiceServicer, DraftServiceServicer, GenerationServiceServicer):
    """Follows an order in the first sequence id of a call or in the text of a prompt."""

    def __init__(self) -> None:
        self.hung = asyncio.Event()

    async def ReleaseTargetSequences(
        self, request: target_pb.ReleaseTargetSequencesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb.ReleaseTargetSequencesResponse:
        await self._obey(request.sequence_ids[0])
        return target_pb.ReleaseTargetSequencesResponse()

    async def VerifyTokens(
        self, requests: AsyncIterator[target_pb.VerifyTokensRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[target_pb.VerifyTokensResponse]:
        async for request in requests:
            await self._obey(request.rows[0].sequence_id)
            yield target_pb.VerifyTokensResponse()

    async def ProposeTokens(
        self, requests: AsyncIterator[draft_pb.ProposeTokensRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[draft_pb.ProposeTokensResponse]:
        async for request in requests:
            await self._obey(request.rows[0].sequence_id)
            yield draft_pb.ProposeTokensResponse()
            # Nobody asked for this.
            yield draft_pb.ProposeTokensResponse(prepared=[draft_pb.PreparedDrafts()])

    async def GenerateText(
        self, request: generation_pb.GenerateTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb.GenerateTextResponse]:
        yield generation_pb.GenerateTextResponse()
        await self._obey(request.text)

    async def _obey(self, order: str) -> None:
        if order == "refuse":
            raise InvalidRequest("as told")
        if order == "break":
            raise ValueError("as told")
        if order == "hang":
            self.hung.set()
            await asyncio.Event().wait()


@asynccontextmanager
async def counted_calls(registry: CollectorRegistry) -> AsyncIterator[tuple[Obedient, grpc.aio.Channel]]:
    servicer = Obedient()  # type: ignore[abstract]

    def add(server: grpc.aio.Server) -> None:
        add_TargetServiceServicer_to_server(servicer, server)
        add_DraftServiceServicer_to_server(servicer, server)
        add_GenerationServiceServicer_to_server(servicer, server)

    counter = CallCounter(registry, "target")
    async with (
        running_server("127.0.0.1", 0, [], add, grace_s=1, interceptors=[counter]) as server,
        open_channel(server.address) as channel,
    ):
        yield servicer, channel


async def release(channel: grpc.aio.Channel, order: str, timeout_s: float = 60) -> None:
    request = target_pb.ReleaseTargetSequencesRequest(sequence_ids=[order])
    await TargetServiceStub(channel).ReleaseTargetSequences(request, timeout=timeout_s)


async def drain(channel: grpc.aio.Channel, order: str, timeout_s: float = 60) -> None:
    call = GenerationServiceStub(channel).GenerateText(generation_pb.GenerateTextRequest(text=order), timeout=timeout_s)
    try:
        async for _ in call:
            pass
    finally:
        # Under load, a stub whose reader was cancelled did not always cancel its call.
        call.cancel()
