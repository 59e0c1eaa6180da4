"""The servicer of DraftService: it translates, runs the work in the model's thread, and translates back."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from draft_service.drafter import Drafter
from paceline.checks import MAX_ROWS, check_row_count
from paceline.codec.models import model_to_pb
from paceline.codec.rounds import lengths_from_pb, proposals_to_pb, propose_rows_from_pb, rollbacks_to_pb
from paceline.codec.versions import check_request_version, versions_to_pb
from paceline.engine.runner import Runner
from paceline.model_service.worker import ModelWorker
from paceline.security.access import caller_scope
from paceline.types import Proposals
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server
from paceline.wire import Exchanges

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
PROPOSE = f"/{SERVICE_NAME}/ProposeTokens"
Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(DraftServiceServicer):
    def __init__(self, drafter: Drafter, worker: ModelWorker, exchanges: Exchanges, max_rows: int = MAX_ROWS) -> None:
        self._drafter = drafter
        self._identity = drafter.runner.describe().identity
        self._worker = worker
        self._exchanges = exchanges
        self._max_rows = max_rows

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Context
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        answer = partial(self._propose, caller_scope(context))
        async for response in self._exchanges.answers(PROPOSE, requests, answer):
            yield response

    async def _propose(self, scope: str, request: pb.ProposeTokensRequest) -> pb.ProposeTokensResponse:
        check_request_version(request.context)
        check_row_count(len(request.rows), self._max_rows)
        rows = propose_rows_from_pb(request)
        results, timing = await self._worker.run_timed(self._drafter.propose, rows, scope)
        return proposals_to_pb(rows, Proposals(results, timing, self._identity))

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: Context
    ) -> pb.RollbackDraftSequencesResponse:
        lengths = lengths_from_pb(request.sequences)
        results = await self._worker.run(self._drafter.runner.rollback, lengths, caller_scope(context))
        return pb.RollbackDraftSequencesResponse(results=rollbacks_to_pb(lengths, results))

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Context
    ) -> pb.ReleaseDraftSequencesResponse:
        count = await self._worker.run(self._drafter.runner.release, list(request.sequence_ids), caller_scope(context))
        return pb.ReleaseDraftSequencesResponse(released_count=count)

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Context
    ) -> pb.DescribeDraftModelResponse:
        return pb.DescribeDraftModelResponse(model=model_to_pb(self._drafter.runner.describe()), wire=versions_to_pb())


def add_draft_service(
    runner: Runner, worker: ModelWorker, exchanges: Exchanges, server: grpc.aio.Server, max_rows: int = MAX_ROWS
) -> None:
    add_DraftServiceServicer_to_server(DraftServicer(Drafter(runner), worker, exchanges, max_rows), server)
