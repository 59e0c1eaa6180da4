"""The servicer of TargetService: it translates, runs the work in the model's thread, and translates back."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import structlog

from paceline.checks import MAX_ROWS, check_row_count
from paceline.codec.models import model_to_pb, tokenizer_to_pb
from paceline.codec.rounds import lengths_from_pb, rollbacks_to_pb, verdicts_to_pb, verify_rows_from_pb
from paceline.codec.versions import check_request_version, versions_to_pb
from paceline.engine.runner import Runner
from paceline.errors import TokenizerNotFound
from paceline.model_service.worker import ModelWorker
from paceline.numerics import promise
from paceline.security.access import caller_scope
from paceline.types import Verdicts
from paceline.v1 import target_service_pb2 as pb
from paceline.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from paceline.wire import Exchanges
from target_service.verifier import Verifier

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TargetService"].full_name
VERIFY = f"/{SERVICE_NAME}/VerifyTokens"
Context = grpc.aio.ServicerContext[Any, Any]
log = structlog.get_logger()


class TargetServicer(TargetServiceServicer):
    def __init__(self, verifier: Verifier, worker: ModelWorker, exchanges: Exchanges, max_rows: int = MAX_ROWS) -> None:
        self._verifier = verifier
        self._identity = verifier.runner.describe().identity
        self._worker = worker
        self._exchanges = exchanges
        self._max_rows = max_rows

    async def VerifyTokens(
        self, requests: AsyncIterator[pb.VerifyTokensRequest], context: Context
    ) -> AsyncIterator[pb.VerifyTokensResponse]:
        answer = partial(self._verify, caller_scope(context))
        async for response in self._exchanges.answers(VERIFY, requests, answer):
            yield response

    async def _verify(self, scope: str, request: pb.VerifyTokensRequest) -> pb.VerifyTokensResponse:
        check_request_version(request.context)
        check_row_count(len(request.rows), self._max_rows)
        rows = verify_rows_from_pb(request)
        results, timing = await self._worker.run_timed(self._verifier.verify, rows, scope)
        return verdicts_to_pb(rows, Verdicts(results, timing, self._identity))

    async def RollbackTargetSequences(
        self, request: pb.RollbackTargetSequencesRequest, context: Context
    ) -> pb.RollbackTargetSequencesResponse:
        lengths = lengths_from_pb(request.sequences)
        results = await self._worker.run(self._verifier.runner.rollback, lengths, caller_scope(context))
        return pb.RollbackTargetSequencesResponse(results=rollbacks_to_pb(lengths, results))

    async def ReleaseTargetSequences(
        self, request: pb.ReleaseTargetSequencesRequest, context: Context
    ) -> pb.ReleaseTargetSequencesResponse:
        count = await self._worker.run(self._verifier.runner.release, list(request.sequence_ids), caller_scope(context))
        return pb.ReleaseTargetSequencesResponse(released_count=count)

    async def DescribeTargetModel(
        self, request: pb.DescribeTargetModelRequest, context: Context
    ) -> pb.DescribeTargetModelResponse:
        return pb.DescribeTargetModelResponse(
            model=model_to_pb(self._verifier.runner.describe()), wire=versions_to_pb()
        )

    async def DownloadTokenizer(
        self, request: pb.DownloadTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.DownloadTokenizerResponse]:
        files = self._verifier.runner.model.tokenizer
        if files is None:
            raise TokenizerNotFound("the target model has no tokenizer; send prompts as token ids")
        for piece in tokenizer_to_pb(files):
            yield piece


def add_target_service(
    runner: Runner,
    worker: ModelWorker,
    exchanges: Exchanges,
    server: grpc.aio.Server,
    max_rows: int = MAX_ROWS,
    *,
    threads_beside_draft: int | None = None,
) -> None:
    log.info("numerics", promise=promise(runner.describe()))
    verifier = Verifier(runner, threads_beside_draft)
    add_TargetServiceServicer_to_server(TargetServicer(verifier, worker, exchanges, max_rows), server)
