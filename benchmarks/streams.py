"""Requests to a coordinator over `GenerateStream`, as a gateway's, by a reader that costs next to nothing."""

from collections.abc import AsyncIterator, Iterable, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any

import grpc
from grpc.aio import EOF

from paceline.codec.generation import request_to_pb
from paceline.types import GenerationRequest
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub


class Door(StrEnum):
    TEXT = "text"
    """`GenerateText`: a call for each request."""
    STREAM = "stream"
    """`GenerateStream`: all requests over one stream, as a gateway's."""


async def stream_messages(
    address: str, requests: Iterable[GenerationRequest], at_once: int | None = None
) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Yield the messages of one stream until all requests ended; so many run at once, or all.

    Streams may take their requests from the same iterator.
    """
    # In a pool of its own, or streams would share a connection, and so a process.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stream: Any = GenerationServiceStub(channel).GenerateStream()
        unsent, open_ids = enumerate(requests), set[int]()
        free_count = at_once
        while True:
            for call_id, request in islice(unsent, free_count):
                started = pb.StartedCall(request=request_to_pb(request))
                await stream.write(pb.GenerateStreamRequest(call_id=call_id, start=started))
                open_ids.add(call_id)
            if not open_ids:
                break
            message = await stream.read()
            assert message is not EOF, f"the stream ended before {len(open_ids)} of its calls"
            yield message
            ended = [one for one in message.updates if one.HasField("ended")]
            assert not any(one.ended.code for one in ended), [one.ended.message for one in ended]
            open_ids.difference_update(one.call_id for one in ended)
            free_count = len(ended)
        await stream.done_writing()


async def read_stream(address: str, requests: Sequence[GenerationRequest]) -> None:
    """Read the messages of one stream, and do nothing with what is in them."""
    async for _ in stream_messages(address, requests):
        pass
