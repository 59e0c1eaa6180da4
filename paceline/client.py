"""The Python client of a coordinator.

async with Client("127.0.0.1:7700") as client:
    async for piece in client.generate(GenerationRequest(Text("2 + 2 ="))):
        print("".join(token.text for token in piece.tokens), end="")

A broken stream is resumed, at this or another coordinator, from the tokens received of each output. The continuation is
the same, token for token. `ModelChanged` is raised when tokens were received and no coordinator serves their model any
more; a request without received tokens begins anew. `paceline.retries` decides when to call again.
"""

import asyncio
import random
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Self

from opentelemetry.trace import Tracer

from paceline.codec.cluster import cluster_from_pb
from paceline.codec.generation import accepted_from_pb, piece_from_pb, request_to_pb
from paceline.codec.models import model_from_pb
from paceline.codec.names import GENERATE_STREAM
from paceline.errors import (
    CallTimedOut,
    InvalidRequest,
    MethodNotFound,
    ModelChanged,
    Overloaded,
    PeerFailed,
    PeerUnavailable,
    SharedStreamLost,
    StartupError,
)
from paceline.observe.tracing import traced_call, traced_channel
from paceline.received import Received
from paceline.retries import DEFAULT_RETRIES, NO_RETRIES, OnRetry, Outage, Retry, RetryPolicy, Sleep
from paceline.security.channels import LOCAL, ChannelSecurity
from paceline.security.limits import LONGEST_TIMEOUT_S
from paceline.shared_stream import SharedStream
from paceline.types import (
    ClusterDescription,
    GenerationAccepted,
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
from paceline.wire import answered, open_channel, translated_errors

__all__ = [
    "NO_RETRIES",
    "Client",
    "Completion",
    "OnAccepted",
    "OnRetry",
    "Retry",
    "RetryPolicy",
    "describe_draft",
    "describe_target",
]

MOST_SHARED_BYTES = 64 << 10
"""Longer requests have a call of their own: others of the stream would wait behind them."""
DESCRIBE_TIMEOUT_S = 10.0
OnAccepted = Callable[[GenerationAccepted], None]
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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


@dataclass(frozen=True)
class _Attempts:
    """The calls that are made for one request."""

    received: Received
    outage: Outage
    of_other_models: set[int] = field(default_factory=set)
    """Places of the coordinators that do not serve the request's model."""
    full: set[int] = field(default_factory=set)
    """Places of those that are not asked again, because they were full."""


class Client:
    """Connections to coordinators. Every failure is raised as a `paceline.errors.PacelineError`.

    A client works in the event loop that it is made in, and in no other.
    """

    def __init__(
        self,
        address: str,
        retries: RetryPolicy = DEFAULT_RETRIES,
        tracer: Tracer | None = None,
        security: ChannelSecurity = LOCAL,
        *,
        shares_stream: bool = False,
        on_retry: OnRetry | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`address` is HOST:PORT, or several separated by commas. One is used until it fails or is full, then the next.

        `tracer` gives calls spans, which become parents of the coordinator's. `security` is needed for other machines;
        make it with `channel_security`. With `shares_stream` all requests go over one stream, which costs a coordinator
        less where there are many at once; one that knows no such streams is called as ever. `on_retry` is called before
        the pause of each retry. `clock` measures outages and `sleep` makes the pauses. Raise StartupError when the
        needed security is missing, and where no event loop runs.
        """
        self._loop = _running_loop()
        self._addresses = [one.strip() for one in address.split(",")]
        self._channels = [open_channel(one, security=security, wrap=traced_channel(tracer)) for one in self._addresses]
        self._security = security
        self._stubs = [GenerationServiceStub(channel) for channel in self._channels]
        self._shared = [SharedStream(stub, security.metadata) for stub in self._stubs] if shares_stream else []
        self._without_streams: set[int] = set()
        """Coordinators that know no shared streams."""
        self._tracer = tracer
        # Clients with the same list should not all begin with the same coordinator.
        self._next = random.randrange(len(self._channels))
        self._retries = retries
        self._on_retry = on_retry
        self._clock = clock
        self._sleep = sleep
        self._is_closed = False

    def _check_loop(self) -> None:
        """Raise StartupError in another event loop than the client's: gRPC would fail there, or wait for ever."""
        if _running_loop() is not self._loop:
            raise StartupError("this client belongs to another event loop; make one in each that calls")

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
        for shared in self._shared:
            await shared.close()
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None = None,
        on_accepted: OnAccepted | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces as rounds commit them; the last of each output has its finish. Closing the iterator cancels.

        `timeout_s` covers the whole output with all retries. Usage counts only the rounds of the last call.
        `on_accepted` is called whenever a coordinator has queued the request, again after a retry. Of `headers`
        coordinators read `x-request-id`, which becomes the request's id, and `traceparent` with its neighbours, which
        make it part of that trace; these are for clients without a tracer.
        """
        ends_at_s = None if timeout_s is None else self._clock() + _checked_timeout_s(timeout_s)
        rest = _seeded(request)
        received, outage = Received(rest), self._outage(ends_at_s)
        attempts, may_share = _Attempts(received, outage), True

        def accept(accepted: GenerationAccepted) -> None:
            received.accept(accepted)
            if on_accepted:
                on_accepted(accepted)

        while True:
            remaining_s = None if ends_at_s is None else max(0.0, ends_at_s - self._clock())
            asked = self._next
            try:
                with named_time(timeout_s):
                    async for piece in self._stream(rest, remaining_s, accept, headers, may_share):
                        received.add(piece)
                        outage.over()
                        yield piece
                break
            except ModelChanged as error:
                await self._leave_other_model(error, asked, attempts)
            except (PeerUnavailable, Overloaded) as error:
                self._without_streams.discard(asked)  # what comes back may be newer
                may_share = may_share and not isinstance(error, SharedStreamLost)  # this request may be at fault
                if received.is_whole:
                    return  # only the end of the stream was lost
                await self._leave_failed(error, asked, attempts)
            rest = received.rest()
        if not received.is_whole:
            raise PeerFailed("the stream ended without a finish; the coordinator is not compatible")

    async def _leave_other_model(self, error: ModelChanged, asked: int, attempts: _Attempts) -> None:
        """Turn to a coordinator that may serve the request's model. Raise the error when there is none left."""
        if not attempts.received.is_bound:
            return await attempts.outage.wait(error, self._addresses[asked])
        attempts.of_other_models.add(asked)
        if not attempts.received.rest().model_digest or not self._turn_besides(attempts.of_other_models):
            raise error

    async def _leave_failed(self, error: PeerUnavailable | Overloaded, asked: int, attempts: _Attempts) -> None:
        """Turn to the next coordinator, after a pause unless this one is only full. Raise when none is to be asked."""
        if self._is_closed:
            raise error
        waits = self._retries.wait_while_full or attempts.received.is_begun
        if (attempts.full or isinstance(error, Overloaded)) and not waits:
            attempts.full.add(asked)
            if not self._turn_besides(attempts.full):
                raise error
            return
        if asked == self._next:
            self._turn()
        await attempts.outage.wait(error, self._addresses[asked])

    def _turn_besides(self, places: Collection[int]) -> bool:
        """Turn to an address outside `places`. Return False when there is none or retries are off."""
        if len(places) == len(self._channels) or not self._retries.retry_for_s:
            return False
        while self._next in places:
            self._turn()
        return True

    async def _stream(
        self,
        request: GenerationRequest,
        timeout_s: float | None,
        accept: OnAccepted,
        headers: Mapping[str, str],
        may_share: bool,
    ) -> AsyncGenerator[OutputPiece, None]:
        self._check_loop()
        lowered = {name.lower(): value for name, value in headers.items()}  # as HTTP/2 has them
        responses = self._responses(self._next, request_to_pb(request), timeout_s, lowered, may_share)
        async with aclosing(responses):
            async for message in responses:
                # Acceptance is no progress and must not end an outage, because the request still waits.
                if message.HasField("accepted"):
                    accept(accepted_from_pb(message.accepted))
                else:
                    yield piece_from_pb(message)

    async def _responses(
        self,
        asked: int,
        request: generation_service_pb2.GenerateTextRequest,
        timeout_s: float | None,
        headers: Mapping[str, str],
        may_share: bool,
    ) -> AsyncGenerator[generation_service_pb2.GenerateTextResponse, None]:
        """Yield the responses of a coordinator, over the shared stream if it may and that is known. Closing cancels."""
        may_share = may_share and bool(self._shared) and request.ByteSize() <= MOST_SHARED_BYTES
        if may_share and asked not in self._without_streams:
            try:
                with traced_call(self._tracer, GENERATE_STREAM, self._addresses[asked]) as span:
                    shared = self._shared[asked].call(request, timeout_s, {**headers, **span})
                    async with aclosing(shared):
                        async for message in shared:
                            yield message
                return
            except MethodNotFound:
                self._without_streams.add(asked)
        with translated_errors():
            metadata = (*self._security.metadata(), *headers.items())
            call = self._stubs[asked].GenerateText(request, timeout=timeout_s, metadata=metadata)
            try:
                async for message in call:
                    yield answered(message)
            finally:
                call.cancel()

    async def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Completion:
        """Return the whole output at its end; the first output when the request asks for several."""
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

    async def describe(self, *, include_costs: bool = False) -> ClusterDescription:
        """Ask the coordinators in turn until one answers, again and again while the outage may last.

        `include_costs` asks what rounds cost too, which only one who plans needs.
        """
        outage = self._outage()
        while True:
            try:
                return await self.describe_once(include_costs=include_costs)
            except PeerUnavailable as error:
                if self._is_closed:
                    raise
                await outage.wait(error, self._addresses[self._next])

    async def describe_once(self, *, include_costs: bool = False) -> ClusterDescription:
        """Ask each coordinator once until one answers. Raise the first one's PeerUnavailable when none does."""
        first, failures = self._next, []
        for place in range(len(self._stubs)):
            asked = (first + place) % len(self._stubs)
            try:
                cluster = await self._describe(asked, include_costs)
            except PeerUnavailable as error:
                failures.append(error)
            else:
                self._next = asked
                return cluster
        raise failures[0]

    async def _describe(self, asked: int, include_costs: bool) -> ClusterDescription:
        self._check_loop()
        try:
            with translated_errors():
                request = generation_service_pb2.DescribeClusterRequest(include_costs=include_costs)
                response = answered(
                    await self._stubs[asked].DescribeCluster(
                        request, timeout=DESCRIBE_TIMEOUT_S, metadata=self._security.metadata()
                    )
                )
        except CallTimedOut as error:
            # A machine that is off does not refuse calls; they just time out.
            raise PeerUnavailable(f"{self._addresses[asked]} did not answer within {DESCRIBE_TIMEOUT_S:g} s") from error
        return cluster_from_pb(response)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise StartupError("no event loop runs here; make a client in a coroutine of the loop that calls") from error


def _seeded(request: GenerationRequest) -> GenerationRequest:
    """Draw a seed when there is none, so that the output can be resumed even if its stream breaks at once."""
    if request.seed is not None or request.received_outputs:
        return request
    return replace(request, seed=secrets.randbits(64))


@contextmanager
def named_time(timeout_s: float | None) -> Iterator[None]:
    """Have CallTimedOut name the time of the whole output: a call only knows what was left of it."""
    try:
        yield
    except CallTimedOut as error:
        if timeout_s is None:
            raise
        raise CallTimedOut(f"the output did not end within {timeout_s:g} s", error.metadata) from error


def _checked_timeout_s(timeout_s: float) -> float:
    if not timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {timeout_s}; give at most {LONGEST_TIMEOUT_S:.0f} s, or None for no limit", field="timeout_s"
        )
    return timeout_s


async def describe_draft(address: str) -> ModelDescription:
    """Ask a draft service directly, which alone knows the current contents and copies of its cache."""
    async with open_channel(address) as channel:
        request = draft_service_pb2.DescribeDraftModelRequest()
        with translated_errors():
            answer = answered(await DraftServiceStub(channel).DescribeDraftModel(request, timeout=DESCRIBE_TIMEOUT_S))
    return model_from_pb(answer.model)


async def describe_target(address: str) -> ModelDescription:
    """Ask a target service directly, as `describe_draft` does a draft service."""
    async with open_channel(address) as channel:
        request = target_service_pb2.DescribeTargetModelRequest()
        with translated_errors():
            answer = answered(await TargetServiceStub(channel).DescribeTargetModel(request, timeout=DESCRIBE_TIMEOUT_S))
    return model_from_pb(answer.model)
