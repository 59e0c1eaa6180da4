"""Call a coordinator from Python.

async with Client("127.0.0.1:7700") as client:
    async for piece in client.generate(GenerationRequest(Text("2 + 2 ="))):
        print("".join(token.text for token in piece.tokens), end="")

A stream that breaks is taken up again, at this or another coordinator, from the tokens received of each output: the
continuation is the same, token for token. Where another model is served meanwhile, that is an error, `ModelChanged`, if
no other coordinator serves the model of what was received; a request of which nothing was received begins anew.
When to call again, `paceline.retries` knows.
"""

import asyncio
import random
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from opentelemetry.trace import Tracer

from paceline.codec.generation import accepted_from_pb, cluster_from_pb, piece_from_pb, request_to_pb
from paceline.codec.models import model_from_pb
from paceline.errors import CallTimedOut, InvalidRequest, ModelChanged, Overloaded, PeerFailed, PeerUnavailable
from paceline.observe.tracing import traced_channel
from paceline.retries import DEFAULT_RETRIES, NO_RETRIES, Clock, OnRetry, Outage, Retry, RetryPolicy, Sleep
from paceline.security.channels import LOCAL, ChannelSecurity
from paceline.types import (
    ClusterDescription,
    GenerationAccepted,
    GenerationFinish,
    GenerationRequest,
    ModelDescription,
    OutputPiece,
    OutputToken,
    ReceivedOutput,
)
from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import answered, open_channel, translated_errors

__all__ = [
    "NO_RETRIES",
    "Client",
    "Completion",
    "OnRetry",
    "Retry",
    "RetryPolicy",
    "describe_draft",
    "describe_target",
]

DESCRIBE_TIMEOUT_S = 10.0
LONGEST_TIMEOUT_S = 1e9
"""Beyond it gRPC takes a call for one whose time is over."""


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


class _Received:
    """What has come of a request's outputs, so that the rest can be asked for."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._token_ids = defaultdict(
            list, {one.completion_index: [*one.token_ids] for one in request.received_outputs}
        )
        self._ended = {one.completion_index for one in request.received_outputs if one.ended}
        self._model_digest = request.model_digest

    def accept(self, accepted: GenerationAccepted) -> None:
        """Note which model the tokens after this are of: those before, if there are any, were of the same."""
        self._model_digest = accepted.model_digest or self._model_digest

    def add(self, piece: OutputPiece) -> None:
        self._token_ids[piece.completion_index] += [token.token_id for token in piece.tokens]
        if piece.finish:
            self._ended.add(piece.completion_index)

    @property
    def is_whole(self) -> bool:
        return self._ended >= set(range(self._request.completion_count or 1))  # 0 means 1 on the wire

    @property
    def is_bound(self) -> bool:
        """Whether no other model will do: there are tokens of one, or its caller named it."""
        return bool(self._request.model_digest or self._ended or any(self._token_ids.values()))

    def rest(self) -> GenerationRequest:
        """Return the request for what is missing."""
        begun = sorted(index for index, token_ids in self._token_ids.items() if token_ids and index not in self._ended)
        outputs = [ReceivedOutput(index, tuple(self._token_ids[index])) for index in begun]
        outputs += [ReceivedOutput(index, ended=True) for index in sorted(self._ended)]
        # Without anything received, any model will do that the request itself will take.
        model_digest = self._model_digest if outputs else self._request.model_digest
        return replace(self._request, received_outputs=tuple(outputs), model_digest=model_digest)


class Client:
    """Connections to coordinators. Every failure is raised as a `paceline.errors.PacelineError`."""

    def __init__(
        self,
        address: str,
        retries: RetryPolicy = DEFAULT_RETRIES,
        tracer: Tracer | None = None,
        security: ChannelSecurity = LOCAL,
        *,
        on_retry: OnRetry | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`address` is HOST:PORT, or several separated by commas: one serves until it fails or is full, then the next.

        A tracer makes spans of the calls, and the coordinator's their children. `security` is needed for other
        machines: make it with `channel_security`. `on_retry` is told of each call that is made again, before the
        pause; `clock` and `sleep` are what outages and pauses are measured and made with. Raises StartupError without
        the security that is needed.
        """
        self._addresses = [one.strip() for one in address.split(",")]
        self._channels = [open_channel(one, security=security, wrap=traced_channel(tracer)) for one in self._addresses]
        self._security = security
        self._stubs = [GenerationServiceStub(channel) for channel in self._channels]
        # Clients with one list of coordinators should not all begin with the same.
        self._next = random.randrange(len(self._channels))
        self._retries = retries
        self._on_retry = on_retry
        self._clock = clock
        self._sleep = sleep
        self._is_closed = False

    def _turn(self) -> None:
        self._next = (self._next + 1) % len(self._channels)

    def _outage(self, ends_at_s: float | None = None) -> Outage:
        return Outage(self._retries, ends_at_s=ends_at_s, clock=self._clock, sleep=self._sleep, on_retry=self._on_retry)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces as rounds commit them, each output's last with its finish. Closing the iterator cancels.

        `timeout_s` is for the whole output, repeated calls included. Usage counts the rounds of the last call only.
        """
        ends_at_s = None if timeout_s is None else self._clock() + _checked_timeout_s(timeout_s)
        rest = _seeded(request)
        received, outage = _Received(rest), self._outage(ends_at_s)
        of_other_models: set[int] = set()
        while True:
            remaining_s = None if ends_at_s is None else max(0.0, ends_at_s - self._clock())
            asked = self._next
            try:
                async for piece in self._stream(rest, remaining_s, received):
                    received.add(piece)
                    outage.over()
                    yield piece
                break
            except ModelChanged as error:
                if received.is_bound:
                    of_other_models.add(asked)
                    if not received.rest().model_digest or not self._turn_besides(of_other_models):
                        raise
                else:
                    await outage.wait(error, self._addresses[asked])
            except (PeerUnavailable, Overloaded) as error:
                if received.is_whole:
                    return  # only the stream's end was lost
                if self._is_closed:
                    raise
                if asked == self._next:
                    self._turn()
                await outage.wait(error, self._addresses[asked])
            rest = received.rest()
        if not received.is_whole:
            raise PeerFailed("the stream ended without a finish; the coordinator is not compatible")

    def _turn_besides(self, places: Collection[int]) -> bool:
        """Turn to another address than these; return False where there is none, or nothing is to be tried again."""
        if len(places) == len(self._channels) or not self._retries.retry_for_s:
            return False
        while self._next in places:
            self._turn()
        return True

    async def _stream(
        self, request: GenerationRequest, timeout_s: float | None, received: _Received
    ) -> AsyncGenerator[OutputPiece, None]:
        with translated_errors():
            call = self._stubs[self._next].GenerateText(
                request_to_pb(request), timeout=timeout_s, metadata=self._security.metadata()
            )
            try:
                async for message in call:
                    # That the request waits is no progress.
                    if answered(message).HasField("accepted"):
                        received.accept(accepted_from_pb(message.accepted))
                    else:
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
        return [Completion(tuple(tokens[index]), finishes[index]) for index in sorted(finishes)]

    async def describe(self) -> ClusterDescription:
        """Ask the coordinators, one after the other, until one answers, and again while the outage may last."""
        outage = self._outage()
        while True:
            try:
                return await self.describe_once()
            except PeerUnavailable as error:
                if self._is_closed:
                    raise
                await outage.wait(error, self._addresses[self._next])

    async def describe_once(self) -> ClusterDescription:
        """Ask each coordinator once until one answers. Raises PeerUnavailable, of the first asked, where none does."""
        first, failures = self._next, []
        for place in range(len(self._stubs)):
            asked = (first + place) % len(self._stubs)
            try:
                cluster = await self._describe(asked)
            except PeerUnavailable as error:
                failures.append(error)
            else:
                self._next = asked
                return cluster
        raise failures[0]

    async def _describe(self, asked: int) -> ClusterDescription:
        try:
            with translated_errors():
                request = generation_service_pb2.DescribeClusterRequest()
                response = answered(
                    await self._stubs[asked].DescribeCluster(
                        request, timeout=DESCRIBE_TIMEOUT_S, metadata=self._security.metadata()
                    )
                )
        except CallTimedOut as error:
            # Nothing at a machine that is off refuses a call.
            raise PeerUnavailable(f"{self._addresses[asked]} did not answer within {DESCRIBE_TIMEOUT_S:g} s") from error
        return cluster_from_pb(response)


def _seeded(request: GenerationRequest) -> GenerationRequest:
    """Draw a seed where there is none: with it the output can be continued though its stream breaks at once."""
    if request.seed is not None or request.received_outputs:
        return request
    return replace(request, seed=secrets.randbits(64))


def _checked_timeout_s(timeout_s: float) -> float:
    if not timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {timeout_s}; give at most {LONGEST_TIMEOUT_S:.0f} s, or None for no limit", field="timeout_s"
        )
    return timeout_s


async def describe_draft(address: str) -> ModelDescription:
    """Ask a draft service itself: what its cache holds and has copied by now, which its coordinator does not know."""
    async with open_channel(address) as channel:
        request = draft_service_pb2.DescribeDraftModelRequest()
        with translated_errors():
            answer = answered(await DraftServiceStub(channel).DescribeDraftModel(request, timeout=DESCRIBE_TIMEOUT_S))
    return model_from_pb(answer.model)


async def describe_target(address: str) -> ModelDescription:
    """Ask a target service itself, as `describe_draft` does."""
    async with open_channel(address) as channel:
        request = target_service_pb2.DescribeTargetModelRequest()
        with translated_errors():
            answer = answered(await TargetServiceStub(channel).DescribeTargetModel(request, timeout=DESCRIBE_TIMEOUT_S))
    return model_from_pb(answer.model)
