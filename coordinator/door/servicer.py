"""The servicer of GenerationService: it translates, queues and streams."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc

from coordinator.door.admission import Admission
from coordinator.door.admission_threads import AdmissionThreads
from coordinator.door.current_model import CurrentModel
from coordinator.door.field_count import check_field_count
from coordinator.door.record import RequestMetrics, RequestRecord
from coordinator.door.tracer import RequestTracer, begin_request, deliver, name_request, queue_request
from coordinator.drafting.draft_models import DraftModels
from coordinator.placement.dispatcher import Dispatcher
from coordinator.requests.generation import Request
from coordinator.rounds.statistics import Statistics
from paceline.codec.generation import accepted_to_pb, cluster_to_pb, piece_to_pb, request_from_pb
from paceline.errors import PacelineError
from paceline.types import ClusterDescription, GenerationAccepted, ReplicaDescription
from paceline.v1 import generation_service_pb2 as pb
from paceline.wire import ended_code, parsed

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Facts:
    """Settings that `DescribeCluster` shows."""

    batch_size: int
    draft_count: int | None
    """Draft tokens a round and generation; None: what pays best."""
    policy: str
    lane_count: int
    shows_addresses: bool


class GenerationServicer:
    def __init__(
        self,
        facts: Facts,
        model: CurrentModel,
        threads: AdmissionThreads,
        dispatcher: Dispatcher,
        drafts: DraftModels,
        statistics: Statistics,
        metrics: RequestMetrics,
        tracer: RequestTracer,
    ) -> None:
        self._facts = facts
        self._model = model
        self._threads = threads
        self._dispatcher = dispatcher
        self._drafts = drafts
        self._statistics = statistics
        self._metrics = metrics
        self._tracer = tracer

    async def GenerateText(self, request: bytes, context: Context) -> AsyncIterator[pb.GenerateTextResponse]:
        record, timeout_s = RequestRecord(self._metrics), context.time_remaining()
        name_request(record.request_id)

        def end(_: object) -> None:
            if record.queued:
                self._dispatcher.abandon(record.queued)
                self._tracer.end(record.queued, record.queued_s, record.time_to_first_token_s)
            record.end(ended_code(context, timeout_s))

        # Called however the call ends: answered, cancelled, timed out or cut off.
        context.add_done_callback(end)  # type: ignore[arg-type]
        try:
            # Refuse early when there is no room even for one output: tokenizing may take long.
            self._dispatcher.check_room(1)
            admission = None
            while admission is not self._model.admission:
                # Again when another model took the place of the one that the request was read for.
                admission = self._model.admission
                admitted = await self._threads.run(partial(_admit, admission, request), len(request))
            admitted.request_id = record.request_id
            if timeout_s is not None:
                admitted.deadline_s = time.perf_counter() + timeout_s
            queue_request(admitted)
            self._dispatcher.submit(admitted)
            record.queue(admitted)
            # Before any token: a client that loses the stream later can resume with this.
            yield accepted_to_pb(self._accepted(admitted))
            async for piece in admitted.stream.pieces():
                is_first = record.deliver(piece)
                deliver(admitted, piece, is_first=is_first)
                # A long prompt with its log-probabilities takes a third of a second: rounds go on meanwhile.
                yield await asyncio.to_thread(piece_to_pb, piece) if piece.prompt_tokens else piece_to_pb(piece)
        except Exception as error:
            record.fail(error)
            raise _without_sequence_ids(error, record) from error

    def _accepted(self, admitted: Request) -> GenerationAccepted:
        model = self._model.target
        return GenerationAccepted(
            admitted.request_id, admitted.seed, admitted.prompt_count, model.identity.model_digest, model.model_id
        )

    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Context) -> pb.DescribeClusterResponse:
        return cluster_to_pb(
            ClusterDescription(
                target=self._model.target,
                draft=self._drafts.description,
                batch_size=self._facts.batch_size,
                draft_count=self._facts.draft_count,
                policy=self._facts.policy,
                lane_count=self._facts.lane_count,
                live_sequence_count=self._dispatcher.live_count,
                waiting_sequence_count=self._dispatcher.waiting_count,
                statistics=self._statistics.snapshot(),
                targets=self._shown(self._dispatcher.describe()),
                drafts=self._shown(self._drafts.describe()),
                costs=self._statistics.costs.snapshot() if request.include_costs else None,
            )
        )

    def _shown(self, replicas: Iterable[ReplicaDescription]) -> tuple[ReplicaDescription, ...]:
        if self._facts.shows_addresses:
            return tuple(replicas)
        return tuple(replace(one, address="") for one in replicas)


def _without_sequence_ids(error: Exception, record: RequestRecord) -> Exception:
    """Replace sequence ids by the request's id: only their secrecy keeps strangers from a sequence."""
    if not isinstance(error, PacelineError):
        return error
    shown = copy.copy(error)
    shown.metadata = {key: value for key, value in error.metadata.items() if key != "sequence_id"}
    for generation in record.queued.generations if record.queued else ():
        shown.message = shown.message.replace(generation.sequence_id, record.request_id)
    return shown


def _admit(admission: Admission, message: bytes) -> Request:
    """Read and admit a request. Runs in a thread: it takes longer for a longer request, and nobody else is to wait."""
    check_field_count(message, pb.GenerateTextRequest.DESCRIPTOR)
    asked = request_from_pb(parsed(message, pb.GenerateTextRequest.FromString))
    request = admission.admit(asked)
    begin_request(asked, request, admission.served.target.model_id)
    return request


def add_generation_service(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Register the servicer as generated code does, but hand over GenerateText requests unparsed."""
    handlers = {
        "GenerateText": grpc.unary_stream_rpc_method_handler(
            servicer.GenerateText, response_serializer=pb.GenerateTextResponse.SerializeToString
        ),
        "DescribeCluster": grpc.unary_unary_rpc_method_handler(
            servicer.DescribeCluster,
            request_deserializer=pb.DescribeClusterRequest.FromString,
            response_serializer=pb.DescribeClusterResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)])
