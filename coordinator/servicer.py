"""Answer GenerationService calls: translate, queue, stream."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.admission import Admission
from coordinator.config import CoordinatorSettings
from coordinator.request_tracer import begin_request, end_request
from coordinator.scheduler import Scheduler
from coordinator.sequence import Sequence
from coordinator.startup import Pair
from paceline.codec.generation import cluster_to_pb, piece_to_pb, request_from_pb
from paceline.types import ClusterDescription
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceServicer

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    def __init__(self, settings: CoordinatorSettings, pair: Pair, admission: Admission, scheduler: Scheduler) -> None:
        self._settings = settings
        self._pair = pair
        self._admission = admission
        self._scheduler = scheduler

    async def GenerateText(
        self, request: pb.GenerateTextRequest, context: Context
    ) -> AsyncIterator[pb.GenerateTextResponse]:
        asked = request_from_pb(request)
        sequences = self._admission.admit(asked)
        begin_request(asked, sequences, self._pair.target.model_id)
        # Called however the call ends: answered, cancelled, timed out or cut off.
        context.add_done_callback(lambda _: self._end(sequences))  # type: ignore[arg-type]
        self._scheduler.submit(sequences)
        async for piece in sequences[0].stream.pieces():
            yield piece_to_pb(piece)

    def _end(self, sequences: list[Sequence]) -> None:
        self._scheduler.abandon(sequences)
        end_request(sequences)

    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Context) -> pb.DescribeClusterResponse:
        scheduler = self._scheduler
        return cluster_to_pb(
            ClusterDescription(
                target=self._pair.target,
                draft=self._pair.draft,
                batch_size=self._settings.batch_size,
                draft_count=None if self._settings.draft_count == "auto" else self._settings.draft_count,
                policy=self._settings.policy,
                lane_count=self._settings.lane_count,
                live_sequence_count=scheduler.pool.live_count,
                waiting_sequence_count=scheduler.pool.waiting_count,
                statistics=scheduler.statistics.snapshot(),
            )
        )
