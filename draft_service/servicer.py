"""The servicer of DraftService."""

from collections.abc import AsyncIterator

import grpc

from draft_service.drafter import Drafter
from paceline.checks import MAX_ROWS
from paceline.codec.rounds import proposals_to_pb, propose_rows_from_pb
from paceline.engine.runner import Runner
from paceline.model_service.servicer import Context, ModelServicer
from paceline.model_service.worker import ModelWorker
from paceline.types import Proposals
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from paceline.wire import Exchanges

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
PROPOSE = f"/{SERVICE_NAME}/ProposeTokens"


class DraftServicer(ModelServicer, DraftServiceServicer):
    def __init__(self, drafter: Drafter, worker: ModelWorker, exchanges: Exchanges, max_rows: int = MAX_ROWS) -> None:
        super().__init__(drafter.runner, worker, exchanges, max_rows)
        self._drafter = drafter

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Context
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        async for response in self._answers(PROPOSE, requests, self._propose, context):
            yield response

    async def _propose(self, scope: str, request: pb.ProposeTokensRequest) -> pb.ProposeTokensResponse:
        rows, results, timing = await self._run_rows(scope, request, propose_rows_from_pb, self._drafter.propose)
        return proposals_to_pb(rows, Proposals(results, timing, self._identity))

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: Context
    ) -> pb.RollbackDraftSequencesResponse:
        return pb.RollbackDraftSequencesResponse(results=await self._roll_back(request, context))

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Context
    ) -> pb.ReleaseDraftSequencesResponse:
        return pb.ReleaseDraftSequencesResponse(released_count=await self._release(request, context))

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Context
    ) -> pb.DescribeDraftModelResponse:
        return pb.DescribeDraftModelResponse(**self._description())


def add_draft_service(
    runner: Runner, worker: ModelWorker, exchanges: Exchanges, server: grpc.aio.Server, max_rows: int = MAX_ROWS
) -> None:
    add_DraftServiceServicer_to_server(DraftServicer(Drafter(runner), worker, exchanges, max_rows), server)
