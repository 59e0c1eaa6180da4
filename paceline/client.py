"""Call a coordinator from Python.

async with Client("127.0.0.1:7700") as client:
    async for piece in client.generate(GenerationRequest(Text("2 + 2 ="))):
        print("".join(token.text for token in piece.tokens), end="")
"""

from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from paceline.codec.generation import cluster_from_pb, piece_from_pb, request_to_pb
from paceline.errors import PeerFailed
from paceline.rpc import open_channel, translated_errors
from paceline.types import ClusterDescription, GenerationFinish, GenerationRequest, OutputPiece, OutputToken
from paceline.v1 import generation_service_pb2
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub

DESCRIBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Completion:
    """A whole output."""

    tokens: tuple[OutputToken, ...]
    finish: GenerationFinish

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Client:
    """A connection to a coordinator. Every failure is raised as a `paceline.errors.PacelineError`."""

    def __init__(self, address: str) -> None:
        """`address` is HOST:PORT."""
        self._channel = open_channel(address)
        self._stub = GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces as rounds commit them, the last with the finish. Closing the iterator cancels the call."""
        with translated_errors():
            call = self._stub.GenerateText(request_to_pb(request), timeout=timeout_s)
            try:
                async for message in call:
                    yield piece_from_pb(message)
            finally:
                call.cancel()

    async def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Completion:
        """Return the whole output at its end; the first one if the request asks for several."""
        return (await self.complete_all(request, timeout_s=timeout_s))[0]

    async def complete_all(self, request: GenerationRequest, *, timeout_s: float | None = None) -> list[Completion]:
        """Return all outputs of a request, by completion index, when the last of them has ended."""
        tokens: defaultdict[int, list[OutputToken]] = defaultdict(list)
        finishes: dict[int, GenerationFinish] = {}
        async for piece in self.generate(request, timeout_s=timeout_s):
            tokens[piece.completion_index] += piece.tokens
            if piece.finish:
                finishes[piece.completion_index] = piece.finish
        if set(finishes) != set(range(request.completion_count)):
            raise PeerFailed("the stream ended without a finish; the coordinator is not compatible")
        return [Completion(tuple(tokens[index]), finishes[index]) for index in sorted(finishes)]

    async def describe(self) -> ClusterDescription:
        with translated_errors():
            request = generation_service_pb2.DescribeClusterRequest()
            return cluster_from_pb(await self._stub.DescribeCluster(request, timeout=DESCRIBE_TIMEOUT_S))
