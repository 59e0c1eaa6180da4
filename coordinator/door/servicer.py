"""The servicer of GenerationService: it translates, queues and streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import grpc

from coordinator.door.call import Calls
from coordinator.door.field_count import check_field_count
from coordinator.door.open_streams import OpenStreams
from coordinator.door.single_requests import Messages, single_request
from coordinator.drafting.draft_models import DraftModels
from coordinator.rounds.statistics import Statistics
from paceline.codec.cluster import cluster_to_pb
from paceline.codec.generation import accepted_to_pb, piece_to_pb, request_from_pb
from paceline.codec.names import GENERATION_SERVICE, MOST_BYTES_KEY, MOST_CALLS_KEY
from paceline.request_ids import REQUEST_ID
from paceline.security.access import Context
from paceline.types import (
    ClusterDescription,
    ComputeDescription,
    DraftSource,
    GenerationRequest,
    ModelDescription,
    ReplicaDescription,
)
from paceline.v1 import generation_service_pb2 as pb
from paceline.wire import parsed, tell_end


@dataclass(frozen=True)
class Facts:
    """What `DescribeCluster` shows of how the coordinator was started."""

    batch_size: int
    draft_count: int | None
    """Draft tokens a round and generation; None: what pays best."""
    policy: str
    lane_count: int
    shows_addresses: bool
    sources: Callable[[ModelDescription], tuple[DraftSource, ...]]
    """Returns the sources that drafts can come from for a target."""
    process_count: int = 1
    process_index: int = 0


class GenerationServicer:
    def __init__(
        self, facts: Facts, calls: Calls, drafts: DraftModels, statistics: Statistics, streams: OpenStreams
    ) -> None:
        self._facts = facts
        self._calls = calls
        self._drafts = drafts
        self._statistics = statistics
        self._streams = streams

    async def GenerateText(self, requests: object, context: Context) -> AsyncIterator[pb.GenerateTextResponse]:
        """Answer the one request; `SingleRequests` has to be around."""
        message = await single_request(context)
        call, timeout_s = self._calls.arrived(_given_id(context)), context.time_remaining()
        tell_end(context, timeout_s, call.end)
        try:
            accepted = await call.queue(partial(_read, message), len(message), timeout_s)
            del message  # it may have megabytes, and the output may wait and last for long
            # Before any token: a client that loses the stream later can resume with this.
            yield accepted_to_pb(accepted)
            to_pb = partial(piece_to_pb, in_runs=call.request.omits_text)
            async for piece in call.stream.pieces():
                call.deliver(piece)
                # A long prompt with its log-probabilities takes a third of a second: rounds go on meanwhile.
                yield await asyncio.to_thread(to_pb, piece) if piece.prompt_tokens else to_pb(piece)
        except Exception as error:
            raise call.failed(error) from error

    async def GenerateStream(self, requests: object, context: Context) -> AsyncIterator[bytes]:
        """Yield messages, serialized."""
        # Callers wait for it: it tells them, before they write, that there are streams here and how much one carries.
        most, most_bytes = str(self._streams.most), str(self._streams.most_bytes)
        await context.send_initial_metadata(((MOST_CALLS_KEY, most), (MOST_BYTES_KEY, most_bytes)))
        async for message in self._streams.open(context).answer(Messages(context)):
            yield message

    async def DescribeCluster(self, request: pb.DescribeClusterRequest, context: Context) -> pb.DescribeClusterResponse:
        return cluster_to_pb(
            ClusterDescription(
                target=self._shown_model(self._calls.model.target),
                draft=self._shown_model(draft) if (draft := self._drafts.description) else None,
                batch_size=self._facts.batch_size,
                draft_count=self._facts.draft_count,
                policy=self._facts.policy,
                lane_count=self._facts.lane_count,
                live_sequence_count=self._calls.dispatcher.live_count,
                waiting_sequence_count=self._calls.dispatcher.waiting_count,
                statistics=self._statistics.snapshot(),
                targets=self._shown(self._calls.dispatcher.describe()),
                drafts=self._shown(self._drafts.describe()),
                costs=self._statistics.costs.snapshot() if request.include_costs else None,
                process_count=self._facts.process_count,
                process_index=self._facts.process_index,
                sources=self._facts.sources(self._calls.model.target),
            )
        )

    def _shown_model(self, model: ModelDescription) -> ModelDescription:
        return model if self._facts.shows_addresses else replace(model, compute=ComputeDescription())

    def _shown(self, replicas: Iterable[ReplicaDescription]) -> tuple[ReplicaDescription, ...]:
        if self._facts.shows_addresses:
            return tuple(replicas)
        return tuple(replace(one, address="") for one in replicas)


def _given_id(context: Context) -> str:
    """Return the id that a call's metadata has for its request; empty without one."""
    return str(dict(context.invocation_metadata() or ()).get(REQUEST_ID, ""))


def _read(message: bytes) -> GenerationRequest:
    check_field_count(message, pb.GenerateTextRequest.DESCRIPTOR)
    return request_from_pb(parsed(message, pb.GenerateTextRequest.FromString))


def add_generation_service(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Register the servicer as generated code does, but hand over requests for output, and take messages, as bytes."""
    handlers = {
        "GenerateText": grpc.unary_stream_rpc_method_handler(
            servicer.GenerateText, response_serializer=pb.GenerateTextResponse.SerializeToString
        ),
        "GenerateStream": grpc.stream_stream_rpc_method_handler(servicer.GenerateStream),
        "DescribeCluster": grpc.unary_unary_rpc_method_handler(
            servicer.DescribeCluster,
            request_deserializer=pb.DescribeClusterRequest.FromString,
            response_serializer=pb.DescribeClusterResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(GENERATION_SERVICE, handlers)])
