"""The servicer of DraftService."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from functools import partial

import grpc
import structlog

from draft_service.drafter import Drafter
from draft_service.pauses import Pauses
from paceline.codec.names import PROPOSE_TOKENS
from paceline.codec.rounds import prepared_to_pb, proposals_to_pb, propose_rows_from_pb
from paceline.engine.runner import Runner
from paceline.errors import PacelineError
from paceline.model_service.servicer import Answering, ModelServicer
from paceline.scope import Caller
from paceline.security.access import Context, caller_scope
from paceline.types import PreparedDrafts, Proposal, Proposals
from paceline.v1 import draft_service_pb2 as pb
from paceline.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server

log = structlog.get_logger()

Unasked = asyncio.Queue[pb.ProposeTokensResponse]


class DraftServicer(ModelServicer, DraftServiceServicer):
    def __init__(self, drafter: Drafter, answering: Answering) -> None:
        super().__init__(drafter.runner, answering)
        self._drafter = drafter
        self._streams: dict[str, Unasked] = {}
        """Where to send what is prepared, by the cache's sequence id: the stream of its last row."""
        self._preparing: asyncio.Task[None] | None = None
        self._is_more_to_prepare = False
        self._pauses = Pauses()

    async def ProposeTokens(
        self, requests: AsyncIterator[pb.ProposeTokensRequest], context: Context
    ) -> AsyncIterator[pb.ProposeTokensResponse]:
        unasked = Unasked()
        answer = partial(self._propose, unasked)
        try:
            async for response in self._answers(PROPOSE_TOKENS, requests, answer, context, unasked):
                yield response
        finally:
            self._streams = {one: stream for one, stream in self._streams.items() if stream is not unasked}

    async def _propose(
        self, unasked: Unasked, caller: Caller, request: pb.ProposeTokensRequest
    ) -> pb.ProposeTokensResponse:
        self._send_nothing(caller.scope, request.context.released_sequence_ids)
        wishing = {caller.scope + row.sequence_id for row in request.rows if row.prepare_count}
        # Before the call, during which its sequences may be released.
        self._streams |= dict.fromkeys(wishing, unasked)
        answered = set[str]()
        self._pauses.asked()
        try:
            work = self._drafter.propose_calls
            rows, results, timing = await self._run_rows(caller, request, propose_rows_from_pb, work)
            proposals = zip(rows, results, strict=True)
            answered = {caller.scope + row.sequence_id for row, one in proposals if isinstance(one, Proposal)}
        finally:
            for sequence_id in wishing - answered:
                if self._streams.get(sequence_id) is unasked:
                    del self._streams[sequence_id]
        self._pauses.answered()
        self._is_more_to_prepare |= bool(wishing)
        if wishing and (self._preparing is None or self._preparing.done()):
            self._preparing = asyncio.create_task(self._prepare())
        return proposals_to_pb(rows, Proposals(results, timing, self._identity))

    async def _prepare(self) -> None:
        """Prepare drafts between calls, a little at a time, and send them, until nobody wants more or calls end."""
        try:
            while self._streams and self._is_more_to_prepare and not self._pauses.is_over:
                # A row that comes during the work, or just after it, is noticed.
                self._is_more_to_prepare = False
                if (prepared := await self._worker.run_between(self._drafter.preparing.work)) is None:
                    continue
                self._is_more_to_prepare = True
                by_stream: defaultdict[Unasked, list[PreparedDrafts]] = defaultdict(list)
                for sequence_id, drafts in prepared:
                    if stream := self._streams.get(sequence_id):
                        by_stream[stream].append(drafts)
                for stream, found in by_stream.items():
                    stream.put_nowait(prepared_to_pb(found))
        except PacelineError as error:
            log.warning("drafts could not be prepared", error=str(error))
        except Exception:
            log.exception("preparing drafts failed unexpectedly")

    async def RollbackDraftSequences(
        self, request: pb.RollbackDraftSequencesRequest, context: Context
    ) -> pb.RollbackDraftSequencesResponse:
        return pb.RollbackDraftSequencesResponse(results=await self._roll_back(request, context))

    async def ReleaseDraftSequences(
        self, request: pb.ReleaseDraftSequencesRequest, context: Context
    ) -> pb.ReleaseDraftSequencesResponse:
        self._send_nothing(caller_scope(context), request.sequence_ids)
        return pb.ReleaseDraftSequencesResponse(released_count=await self._release(request, context))

    def _send_nothing(self, scope: str, sequence_ids: Iterable[str]) -> None:
        """Prepare nothing more for sequences that are freed."""
        for sequence_id in sequence_ids:
            self._streams.pop(scope + sequence_id, None)

    async def DescribeDraftModel(
        self, request: pb.DescribeDraftModelRequest, context: Context
    ) -> pb.DescribeDraftModelResponse:
        return pb.DescribeDraftModelResponse(**self._description())


def add_draft_service(runner: Runner, answering: Answering, server: grpc.aio.Server) -> None:
    add_DraftServiceServicer_to_server(DraftServicer(Drafter(runner), answering), server)
