"""Call a coordinator from Python.

async with Client("127.0.0.1:7700") as client:
    async for piece in client.generate(GenerationRequest(Text("2 + 2 ="))):
        print("".join(token.text for token in piece.tokens), end="")

A stream that breaks is taken up again, at this or another coordinator, from the tokens received: the continuation is
the same, token for token. A coordinator that is full is asked again when it says.
"""

import asyncio
import random
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from opentelemetry.trace import Tracer

from paceline.codec.generation import cluster_from_pb, piece_from_pb, request_to_pb
from paceline.codec.models import model_from_pb
from paceline.errors import CallTimedOut, Overloaded, PacelineError, PeerFailed, PeerUnavailable
from paceline.rpc import open_channel, translated_errors
from paceline.security.channels import LOCAL, ChannelSecurity
from paceline.types import (
    ClusterDescription,
    GenerationFinish,
    GenerationRequest,
    ModelDescription,
    OutputPiece,
    OutputToken,
)
from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub

DESCRIBE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RetryPolicy:
    """When to call again: only where that is safe, which is before anything was received or with what was."""

    attempts: int = 5
    """Failures in a row, without a token between them, before one is raised. Being full is no failure."""
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def delay_s(self, failures: int) -> float:
        """Exponential, with jitter so that clients of one failed coordinator do not come back as one."""
        longest_s: float = min(self.max_delay_s, self.first_delay_s * 2 ** (failures - 1))
        return random.uniform(0.5, 1.0) * longest_s


NO_RETRIES = RetryPolicy(attempts=1)


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
    """Connections to coordinators. Every failure is raised as a `paceline.errors.PacelineError`."""

    def __init__(
        self,
        address: str,
        retries: RetryPolicy = RetryPolicy(),
        tracer: Tracer | None = None,
        security: ChannelSecurity = LOCAL,
    ) -> None:
        """`address` is HOST:PORT, or several separated by commas: one serves until it fails or is full, then the next.

        A tracer makes spans of the calls, and the coordinator's their children. `security` is needed for other
        machines: make it with `channel_security`. Raises StartupError without.
        """
        self._channels = [open_channel(one.strip(), security=security, tracer=tracer) for one in address.split(",")]
        self._security = security
        self._stubs = [GenerationServiceStub(channel) for channel in self._channels]
        # Clients with one list of coordinators should not all begin with the same.
        self._next = random.randrange(len(self._channels))
        self._retries = retries

    def _turn(self) -> None:
        self._next = (self._next + 1) % len(self._channels)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces as rounds commit them, each output's last with its finish. Closing the iterator cancels.

        `timeout_s` is for the whole output, repeated calls included. Usage counts the rounds of the last call only.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        if request.seed is None:
            # Drawn here, so that the output can be continued wherever the stream breaks.
            request = replace(request, seed=secrets.randbits(64))
        received = list(request.received_token_ids)
        failures = 0
        while True:
            remaining_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
            asked = self._next
            try:
                async for piece in self._stream(replace(request, received_token_ids=tuple(received)), remaining_s):
                    received += [token.token_id for token in piece.tokens]
                    failures = 0
                    yield piece
                return
            except (PeerUnavailable, Overloaded) as error:
                failures += isinstance(error, PeerUnavailable)
                if asked == self._next:
                    self._turn()
                await self._wait(
                    error, failures, resumable=request.completion_count == 1 or not received, ends_at=ends_at
                )

    async def _stream(self, request: GenerationRequest, timeout_s: float | None) -> AsyncGenerator[OutputPiece, None]:
        with translated_errors():
            call = self._stubs[self._next].GenerateText(
                request_to_pb(request), timeout=timeout_s, metadata=self._security.metadata()
            )
            try:
                async for message in call:
                    yield piece_from_pb(message)
            finally:
                call.cancel()

    async def _wait(self, error: PacelineError, failures: int, *, resumable: bool, ends_at: float | None) -> None:
        """Wait before the next call; raise the error instead when there should be none."""
        if failures >= self._retries.attempts or self._retries == NO_RETRIES or not resumable:
            raise error
        delay_s = self._retries.delay_s(max(1, failures))
        if isinstance(error, Overloaded):
            delay_s = max(delay_s, error.retry_after_s)
        if ends_at is not None and time.monotonic() + delay_s >= ends_at:
            raise CallTimedOut(f"the output did not end in time; the last call failed: {error.message}") from error
        await asyncio.sleep(delay_s)

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
        """Ask the coordinators, one after the other, until one answers."""
        for _ in self._channels[1:]:
            with suppress(PeerUnavailable):
                return await self._describe()
            self._turn()
        return await self._describe()

    async def _describe(self) -> ClusterDescription:
        with translated_errors():
            request = generation_service_pb2.DescribeClusterRequest()
            response = await self._stubs[self._next].DescribeCluster(
                request, timeout=DESCRIBE_TIMEOUT_S, metadata=self._security.metadata()
            )
        return cluster_from_pb(response)


async def describe_draft(address: str) -> ModelDescription:
    """Ask a draft service itself: what its cache holds and has copied by now, which its coordinator does not know."""
    async with open_channel(address) as channel:
        request = draft_service_pb2.DescribeDraftModelRequest()
        with translated_errors():
            answer = await DraftServiceStub(channel).DescribeDraftModel(request, timeout=DESCRIBE_TIMEOUT_S)
    return model_from_pb(answer.model)


async def describe_target(address: str) -> ModelDescription:
    """Ask a target service itself, as `describe_draft` does."""
    async with open_channel(address) as channel:
        request = target_service_pb2.DescribeTargetModelRequest()
        with translated_errors():
            answer = await TargetServiceStub(channel).DescribeTargetModel(request, timeout=DESCRIBE_TIMEOUT_S)
    return model_from_pb(answer.model)
