"""Errors over real gRPC, whatever they quote: each reaches its caller as itself."""

from typing import Any

import grpc
import pytest

from paceline.errors import InvalidRequest, MessageTooLarge
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, DraftServiceStub
from paceline.wire import open_channel, translated_errors
from tests.fakes.draft_servers import draft_server

TIMEOUT_S = 60.0


class Refusing(DraftServiceServicer):
    """Refuses releases with an error that quotes what was sent, and rollbacks with more than gRPC lets through."""

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Any
    ) -> pb.ReleaseDraftSequencesResponse:
        (quoted,) = request.sequence_ids
        raise InvalidRequest(quoted, {"sequence_id": quoted}, field="sequence_ids")

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RollbackDraftSequencesResponse:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "x" * 100_000)


@pytest.mark.parametrize("character", ["x", "%", "é", "字", "😀"])
async def test_an_error_that_quotes_a_long_text_reaches_its_caller(character: str) -> None:
    """gRPC said RESOURCE_EXHAUSTED in its place, and clients asked a coordinator for ever that seemed full."""
    async with draft_server(Refusing()) as (_, address), open_channel(address) as channel:  # type: ignore[abstract]
        request = pb.ReleaseDraftSequencesRequest(sequence_ids=[character * 2000])
        with pytest.raises(InvalidRequest) as refused, translated_errors():
            await DraftServiceStub(channel).ReleaseDraftSequences(request, timeout=TIMEOUT_S)
    assert refused.value.field == "sequence_ids"
    assert refused.value.message.startswith(character * 200)


async def test_an_answer_that_grpc_does_not_let_through_is_final() -> None:
    async with draft_server(Refusing()) as (_, address), open_channel(address) as channel:  # type: ignore[abstract]
        with pytest.raises(MessageTooLarge, match="metadata size exceeds"), translated_errors():
            await DraftServiceStub(channel).RollbackDraftSequences(
                pb.RollbackDraftSequencesRequest(), timeout=TIMEOUT_S
            )
