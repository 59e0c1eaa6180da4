"""The servicer of TargetService."""

from collections.abc import AsyncIterator

import grpc
import structlog

from paceline.codec.models import tokenizer_to_pb
from paceline.codec.names import VERIFY_TOKENS
from paceline.codec.rounds import verdicts_to_pb, verify_rows_from_pb
from paceline.engine.runner import Runner
from paceline.errors import TokenizerNotFound
from paceline.model_service.servicer import Answering, ModelServicer
from paceline.numerics import promise
from paceline.scope import Caller
from paceline.security.access import Context
from paceline.types import Verdicts
from paceline.v1 import target_service_pb2 as pb
from paceline.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from target_service.verifier import Verifier

log = structlog.get_logger()


class TargetServicer(ModelServicer, TargetServiceServicer):
    def __init__(self, verifier: Verifier, answering: Answering) -> None:
        super().__init__(verifier.runner, answering)
        self._verifier = verifier

    async def VerifyTokens(
        self, requests: AsyncIterator[pb.VerifyTokensRequest], context: Context
    ) -> AsyncIterator[pb.VerifyTokensResponse]:
        async for response in self._answers(VERIFY_TOKENS, requests, self._verify, context):
            yield response

    async def _verify(self, caller: Caller, request: pb.VerifyTokensRequest) -> pb.VerifyTokensResponse:
        rows, results, timing = await self._run_rows(caller, request, verify_rows_from_pb, self._verifier.verify_calls)
        return verdicts_to_pb(rows, Verdicts(results, timing, self._identity))

    async def RollbackTargetSequences(
        self, request: pb.RollbackTargetSequencesRequest, context: Context
    ) -> pb.RollbackTargetSequencesResponse:
        return pb.RollbackTargetSequencesResponse(results=await self._roll_back(request, context))

    async def ReleaseTargetSequences(
        self, request: pb.ReleaseTargetSequencesRequest, context: Context
    ) -> pb.ReleaseTargetSequencesResponse:
        return pb.ReleaseTargetSequencesResponse(released_count=await self._release(request, context))

    async def DescribeTargetModel(
        self, request: pb.DescribeTargetModelRequest, context: Context
    ) -> pb.DescribeTargetModelResponse:
        return pb.DescribeTargetModelResponse(**self._description())

    async def DownloadTokenizer(
        self, request: pb.DownloadTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.DownloadTokenizerResponse]:
        files = self._runner.model.tokenizer
        if files is None:
            raise TokenizerNotFound("the target model has no tokenizer; send prompts as token ids")
        for piece in tokenizer_to_pb(files):
            yield piece


def add_target_service(
    runner: Runner, answering: Answering, server: grpc.aio.Server, *, threads_beside_draft: int | None = None
) -> None:
    log.info("numerics", promise=promise(runner.describe()))
    verifier = Verifier(runner, threads_beside_draft)
    add_TargetServiceServicer_to_server(TargetServicer(verifier, answering), server)
