"""Answer DraftService calls: translate, run in the model's thread, translate back."""

from typing import Any

import grpc

from draft_service.drafter import Drafter
from paceline.codec.models import model_to_pb
from paceline.codec.rounds import lengths_from_pb, proposals_to_pb, propose_rows_from_pb, rollbacks_to_pb
from paceline.engine.runner import Runner
from paceline.engine.worker import ModelWorker
from paceline.errors import InvalidRequest
from paceline.types import Proposals
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(DraftServiceServicer):
    def __init__(self, drafter: Drafter, worker: ModelWorker) -> None:
        self._drafter = drafter
        self._worker = worker

    async def ProposeTokens(self, request: pb.ProposeTokensRequest, context: Context) -> pb.ProposeTokensResponse:
        if not request.rows:
            raise InvalidRequest("rows is empty; send one row a sequence", field="rows")
        rows = propose_rows_from_pb(request)
        results, timing = await self._worker.run_timed(self._drafter.propose, rows)
        return proposals_to_pb(rows, Proposals(results, timing))

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: Context
    ) -> pb.RollbackDraftSequencesResponse:
        lengths = lengths_from_pb(request.sequences)
        results = await self._worker.run(self._drafter.runner.rollback, lengths)
        return pb.RollbackDraftSequencesResponse(results=rollbacks_to_pb(lengths, results))

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Context
    ) -> pb.ReleaseDraftSequencesResponse:
        count = await self._worker.run(self._drafter.runner.release, list(request.sequence_ids))
        return pb.ReleaseDraftSequencesResponse(released_count=count)

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Context
    ) -> pb.DescribeDraftModelResponse:
        return pb.DescribeDraftModelResponse(model=model_to_pb(self._drafter.runner.describe()))


def add_draft_service(runner: Runner, worker: ModelWorker, server: grpc.aio.Server) -> None:
    add_DraftServiceServicer_to_server(DraftServicer(Drafter(runner), worker), server)
