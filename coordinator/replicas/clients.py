"""Clients of the draft and target services: calls with deadlines, answers as values or errors."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.protocols import ANY_TIME, Deadline, OnStreamEnd
from coordinator.replicas.plausibility import check_description, check_identity
from paceline.codec.models import identity_from_pb, model_from_pb, tokenizer_from_pb
from paceline.codec.names import DRAFT_SERVICE, TARGET_SERVICE
from paceline.codec.rounds import (
    lengths_to_pb,
    prepared_from_pb,
    proposals_from_pb,
    propose_rows_to_pb,
    rollbacks_from_pb,
    verdicts_from_pb,
    verify_rows_to_pb,
)
from paceline.codec.versions import (
    RELEASES_ALONG,
    VERSION,
    check_answer_version,
    check_service_versions,
    version_of,
    version_refusal,
)
from paceline.errors import IncompatiblePair, PacelineError, TokenizerNotFound, WrongAnswer
from paceline.scope import RowT
from paceline.types import (
    ModelDescription,
    ModelIdentity,
    PreparedDrafts,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenizerFiles,
    Verdicts,
    VerifyRow,
)
from paceline.v1 import draft_service_pb2, target_service_pb2
from paceline.v1.draft_service_pb2_grpc import DraftServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import Exchange, answered, translated_errors
from paceline.wire.peers import DRAFT, TARGET, service_at

RELEASE_TIMEOUT_S = 5.0
MOST_RELEASED = 256
"""Sequences to free that a request names; more are named by the next ones, or by a call of their own."""
MANY_BIASES = 1024
"""Logit biases of all rows of a call: encoding these takes a millisecond."""

ResultT = TypeVar("ResultT")


class _Named(Protocol):
    @property
    def sequence_id(self) -> str: ...


class _RemoteModel:
    """The calls that both services share. Closing it closes the channel."""

    _kind: ClassVar[str]
    """The service it should be, in words for error messages."""

    def __init__(self, channel: grpc.aio.Channel, service_name: str, work: Exchange, timeout_s: float) -> None:
        """`work` carries the propose or verify requests; `timeout_s` limits each of them."""
        self._channel = channel
        self._work = work
        self._service_name = service_name
        self._timeout_s = timeout_s
        self._health: Any = health_pb2_grpc.HealthStub(channel)  # the published stubs know no methods
        self._owed: dict[str, object] = {}
        """Sequences to free, each with the occasion at which it was owed last."""
        self._identity: ModelIdentity | None = None
        """The process whose answers are accepted; None: any process."""
        self._latest_version = VERSION
        """Of the wire, as the service said last; until then it refuses itself what it would misread."""

    async def close(self) -> None:
        await self._work.close()
        await self._channel.close()

    async def is_serving(self, timeout_s: float) -> bool:
        """Return whether the service wants calls. Raise IncompatiblePair when another service answers."""
        request = health_pb2.HealthCheckRequest(service=self._service_name)
        with translated_errors():
            try:
                response = answered(await self._health.Check(request, timeout=timeout_s))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                found = await service_at(self._channel)
                raise IncompatiblePair(
                    f"what answers is {found} and not {self._kind}; correct --draft or --target"
                ) from error
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def tell_stream_ends(self, on_end: OnStreamEnd) -> None:
        self._work.tell_ends(on_end)

    def owe(self, sequence_ids: list[str]) -> None:
        """Leave sequences to be freed by the next request, which spares a call, or by `release`."""
        self._owed |= dict.fromkeys(sequence_ids, object())

    @property
    def owed_count(self) -> int:
        return len(self._owed)

    async def release(self) -> int:
        """Free what is owed; return how many sequences. Those that the service did not hear of stay owed."""
        if due := self._due():
            with translated_errors():
                await self._release([*due])
            self._freed(due)
        return len(due)

    def _due(self) -> dict[str, object]:
        """Return what is owed, without sequences of requests that the service may have yet to serve.

        It would cache them again, and nobody may wait for these requests.
        """
        return {one: occasion for one, occasion in self._owed.items() if not self._work.is_under_way(one)}

    def _due_along(self) -> dict[str, object]:
        """Return what a request is to free, unless another that is under way does."""
        due = (owed for owed in self._due().items() if not self._work.is_ending(owed[0]))
        return dict(islice(due, MOST_RELEASED))

    def _freed(self, due: Mapping[str, object]) -> None:
        """Note that the service heard of what was due. What was used and owed again since is owed still."""
        for sequence_id, occasion in due.items():
            if self._owed.get(sequence_id) is occasion:
                del self._owed[sequence_id]

    def trust(self, identity: ModelIdentity) -> None:
        self._identity = identity

    def _readable(self, rows: Sequence[RowT]) -> tuple[Sequence[RowT], dict[int, PacelineError]]:
        """Return the rows without those that the service is too old to read, and errors for these by index."""
        errors: dict[int, PacelineError] = {
            index: version_refusal(row.rule, self._latest_version, self._kind)
            for index, row in enumerate(rows)
            if row.rule and version_of(row.rule) > self._latest_version
        }
        return [row for index, row in enumerate(rows) if index not in errors] if errors else rows, errors

    async def _ask(self, rows: Sequence[_Named], request: Any, timeout_s: float | None) -> Any:
        """Return the response to the rows. Raise the call's error, or PeerUnavailable when another process answers."""
        names = [row.sequence_id for row in rows]
        for name in names:
            self._owed.pop(name, None)  # they are used again: who leaves them says so again
        due = self._due_along()
        request.context.released_sequence_ids.extend(due)
        with translated_errors():
            response = answered(await self._work.ask(request, self._limited(timeout_s), names, due))
        check_answer_version(response.wire_version, self._kind)
        check_identity(self._identity, identity_from_pb(response.identity))
        if response.wire_version >= RELEASES_ALONG:
            self._freed(due)
        _check_answers(rows, response.results)
        return response

    async def describe(self, timeout_s: float) -> ModelDescription:
        """Return the model's description. Raise IncompatiblePair when the service itself is too old or too new.

        Raise WrongAnswer when the description cannot be true.
        """
        with translated_errors():
            response = answered(await self._describe(timeout_s))
        check_service_versions(response.wire, self._kind)
        model = model_from_pb(response.model)
        check_description(model)
        self._latest_version = response.wire.latest
        return model

    @abstractmethod
    def _describe(self, timeout_s: float) -> Awaitable[Any]: ...
    @abstractmethod
    async def _release(self, sequence_ids: list[str]) -> None: ...

    def _limited(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else min(self._timeout_s, timeout_s)


class RemoteDrafter(_RemoteModel):
    _kind = DRAFT

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = DraftServiceStub(channel)
        self._take_prepared: Callable[[Sequence[PreparedDrafts]], None] = lambda prepared: None
        super().__init__(channel, DRAFT_SERVICE, Exchange(self._stub.ProposeTokens, self._take_unasked), timeout_s)

    def listen(self, take: Callable[[Sequence[PreparedDrafts]], None]) -> None:
        self._take_prepared = take

    def _take_unasked(self, response: draft_service_pb2.ProposeTokensResponse) -> None:
        """Take in drafts that were prepared."""
        self._take_prepared(prepared_from_pb(response))

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline = ANY_TIME) -> Proposals:
        sent, errors = self._readable(rows)
        if errors and not sent:
            return Proposals([*errors.values()])
        request = await _encoded(sent, propose_rows_to_pb)
        proposals = proposals_from_pb(await self._ask(sent, request, deadline.timeout_s))
        return replace(proposals, results=_with_errors(proposals.results, errors)) if errors else proposals

    async def _release(self, sequence_ids: list[str]) -> None:
        request = draft_service_pb2.ReleaseDraftSequencesRequest(sequence_ids=sequence_ids)
        await self._stub.ReleaseDraftSequences(request, timeout=RELEASE_TIMEOUT_S)

    def _describe(self, timeout_s: float) -> Awaitable[Any]:
        return self._stub.DescribeDraftModel(draft_service_pb2.DescribeDraftModelRequest(), timeout=timeout_s)


class RemoteVerifier(_RemoteModel):
    _kind = TARGET

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = TargetServiceStub(channel)
        super().__init__(channel, TARGET_SERVICE, Exchange(self._stub.VerifyTokens), timeout_s)

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        sent, errors = self._readable(rows)
        if errors and not sent:
            return Verdicts([*errors.values()])
        response = await self._ask(sent, await _encoded(sent, verify_rows_to_pb), timeout_s)
        verdicts = verdicts_from_pb(sent, response)
        return replace(verdicts, results=_with_errors(verdicts.results, errors)) if errors else verdicts

    async def _release(self, sequence_ids: list[str]) -> None:
        request = target_service_pb2.ReleaseTargetSequencesRequest(sequence_ids=sequence_ids)
        await self._stub.ReleaseTargetSequences(request, timeout=RELEASE_TIMEOUT_S)

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        """Cut sequences to the given lengths and return what each freed."""
        request = target_service_pb2.RollbackTargetSequencesRequest(sequences=lengths_to_pb(lengths))
        with translated_errors():
            response = answered(await self._stub.RollbackTargetSequences(request, timeout=RELEASE_TIMEOUT_S))
        return rollbacks_from_pb(response.results)

    def _describe(self, timeout_s: float) -> Awaitable[Any]:
        return self._stub.DescribeTargetModel(target_service_pb2.DescribeTargetModelRequest(), timeout=timeout_s)

    async def download_tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer; None when the target has none: then prompts and outputs are token ids only."""
        try:
            with translated_errors():
                call = self._stub.DownloadTokenizer(
                    target_service_pb2.DownloadTokenizerRequest(), timeout=self._timeout_s
                )
                return tokenizer_from_pb([answered(piece) async for piece in call])
        except TokenizerNotFound:
            return None


async def _encoded(rows: Sequence[RowT], to_pb: Callable[[Sequence[RowT]], Any]) -> Any:
    """Encode rows as a request, in a thread when their rules are long, so that other calls go on meanwhile."""
    bias_count = sum(len(row.rule.sampling.logit_bias) for row in rows if row.rule)
    return to_pb(rows) if bias_count < MANY_BIASES else await asyncio.to_thread(to_pb, rows)


def _with_errors(results: Sequence[ResultT], errors: Mapping[int, ResultT]) -> list[ResultT]:
    """Return the results of the rows that were sent, with the errors of the others in their places."""
    merged = [*results]
    for index, error in errors.items():
        merged.insert(index, error)
    return merged


def _check_answers(rows: Sequence[_Named], results: Iterable[_Named]) -> None:
    """Raise WrongAnswer when the results are for other rows, for example those of an earlier, late answer."""
    if [one.sequence_id for one in results] != [one.sequence_id for one in rows]:
        raise WrongAnswer(f"{len(rows)} rows were sent and the results are for others; the peer is not compatible")
