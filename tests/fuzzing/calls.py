"""One call with any bytes, broken off anywhere, and its allowed outcomes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from hypothesis import strategies as st

from coordinator.door.limits import MAX_REQUEST_BYTES
from paceline.codec.status import DOMAIN
from paceline.security.limits import MAX_MESSAGE_BYTES
from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2
from tests.fuzzing.messages import payloads

Code = grpc.StatusCode
PATIENCE_S = 120.0
"""Deadline in seconds of calls that should end by themselves."""
STUB_FAILED = "Internal error from Core"
"""Details that gRPC's stub, not the service, gives with INTERNAL if the call ended before a message was sent."""

METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for module in (draft_service_pb2, target_service_pb2, generation_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)


class Ending(Enum):
    ANSWER = "wait for the answer"
    CANCEL = "cancel it after some turns of the loop"
    HALF = "send no end of the request, then cancel"
    NOTHING = "send no message, only the end"
    TWICE = "send the message twice"
    DEADLINE = "give it almost no time"


@dataclass(frozen=True)
class Call:
    method: MethodDescriptor
    payload: bytes
    ending: Ending = Ending.ANSWER
    turns: int = 0
    """Turns of the event loop before the call is cancelled."""
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    def __repr__(self) -> str:
        return f"Call({self.path}, {self.payload[:400]!r}, {self.ending}, {self.turns}, {self.metadata})"


@dataclass(frozen=True)
class Answer:
    code: Code
    details: str
    status: status_pb2.Status | None
    """Status sent by the service itself; None if there is none."""
    responses: tuple[bytes, ...]


_ENDINGS = (*(Ending.ANSWER,) * 12, *Ending)
_METADATA = (
    *((),) * 6,
    (("traceparent", "00-" + "f" * 32 + "-" + "0" * 16 + "-01"),),
    (("traceparent", "not a trace"), ("tracestate", "=,=,,")),
    (("baggage", "a=" + "b" * 3000), ("authorization", "Bearer nobody")),
)


_WEIGHTED_METHODS = tuple(method for method in METHODS for _ in range(5 if method.input_type.fields else 1))


@st.composite
def calls(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Call:
    method = draw(st.sampled_from(_WEIGHTED_METHODS))
    return Call(
        method,
        draw(payloads(method.input_type)),
        draw(st.sampled_from(_ENDINGS)),
        draw(st.integers(0, 30)),
        draw(st.sampled_from(_METADATA)),
    )


async def send(channel: grpc.aio.Channel, one: Call) -> Answer:
    """Make the call through a stub that knows no message types, and wait for its end."""
    open_call: Any = channel.stream_stream(one.path)  # without serializers it takes and returns bytes
    # A call without a request gets no answer: gRPC's server waits for the message.
    short = one.ending in (Ending.DEADLINE, Ending.NOTHING)
    ended = asyncio.Event()
    stream = open_call(_requests(one, ended), timeout=0.01 if short else PATIENCE_S, metadata=one.metadata)
    responses: list[bytes] = []
    try:
        if one.ending in (Ending.CANCEL, Ending.HALF):
            for _ in range(one.turns):
                await asyncio.sleep(0)
            stream.cancel()
        async for response in stream:
            responses.append(response)
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass  # the status reports it
    finally:
        ended.set()
    code, details = await stream.code(), await stream.details()
    if details == STUB_FAILED:
        code = {Ending.TWICE: Code.CANCELLED}.get(one.ending, Code.DEADLINE_EXCEEDED if short else code)
    return Answer(code, details, _status(await stream.trailing_metadata()), tuple(responses))


async def _requests(one: Call, ended: asyncio.Event) -> AsyncIterator[bytes]:
    for _ in range({Ending.NOTHING: 0, Ending.TWICE: 2}.get(one.ending, 1)):
        yield one.payload
    if one.ending is Ending.HALF:
        await ended.wait()


def _status(trailers: Any) -> status_pb2.Status | None:
    found = dict(trailers or ()).get("grpc-status-details-bin")
    return status_pb2.Status.FromString(found) if found else None


def complaint(one: Call, answer: Answer) -> str:
    """Return the fault of an answer; empty for a sound answer."""
    if answer.code not in allowed_codes(one):
        return f"{answer.code.name} is not among {sorted(code.name for code in allowed_codes(one))}: {answer.details}"
    explained = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION}
    if not is_too_large(one):
        explained.add(Code.RESOURCE_EXHAUSTED)
    if answer.code in explained and (problem := _unexplained(answer)):
        return problem
    return next(filter(None, (_row_complaint(one, status) for status in row_statuses(one, answer))), "")


def allowed_codes(one: Call) -> set[Code]:
    """Return the statuses that the call may end with, given its faults."""
    # A stub itself cancels a call whose message it could not send in time.
    in_time = {Code.DEADLINE_EXCEEDED, Code.CANCELLED}
    by_ending = {
        Ending.CANCEL: {Code.CANCELLED},
        Ending.HALF: {Code.CANCELLED},
        Ending.NOTHING: in_time,
        Ending.DEADLINE: in_time,
        Ending.TWICE: {Code.CANCELLED},
    }
    allowed = by_ending.get(one.ending, set())
    if one.ending is Ending.NOTHING:
        return {*allowed, Code.OK} if one.method.client_streaming else allowed
    if is_too_large(one):
        return allowed | {Code.RESOURCE_EXHAUSTED}
    if parsed(one) is None:
        return allowed | {Code.INVALID_ARGUMENT}
    allowed = allowed | {Code.OK, Code.INVALID_ARGUMENT}
    of_requests = {Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION}  # no room now; another model
    return allowed | (of_requests if one.method.name == "GenerateText" else set())


def is_too_large(one: Call) -> bool:
    is_for_coordinator = one.method.containing_service.name == "GenerationService"
    return len(one.payload) > (MAX_REQUEST_BYTES if is_for_coordinator else MAX_MESSAGE_BYTES)


def parsed(one: Call) -> Message | None:
    """Return the request as its service parses it; None if it cannot."""
    try:
        return GetMessageClass(one.method.input_type).FromString(one.payload)
    except DecodeError:
        return None


def named_sequences(one: Call) -> set[str]:
    """Return sequence ids that a model service may hold after the call."""
    rows = getattr(parsed(one), "rows", ())
    return {row.sequence_id for row in rows}


def _unexplained(answer: Answer) -> str:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    found = {
        type(m)
        for detail in (answer.status.details if answer.status else ())
        for m in (info, retry)
        if detail.Unpack(m)
    }
    if info.domain != DOMAIN or not info.reason:
        return f"{answer.code.name} without ErrorInfo: {answer.details}"
    if answer.code is Code.RESOURCE_EXHAUSTED and error_details_pb2.RetryInfo not in found:
        return f"RESOURCE_EXHAUSTED without RetryInfo: {answer.details}"
    return ""


def row_statuses(one: Call, answer: Answer) -> list[status_pb2.Status]:
    """Return the statuses of an answer's rows, if it has rows."""
    output = one.method.output_type
    if "results" not in output.fields_by_name:
        return []
    answers: list[Any] = [GetMessageClass(output).FromString(response) for response in answer.responses]
    return [result.status for message in answers for result in message.results]


_ROW_CODES = {
    code.value[0] for code in (Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED)
}
_ROLLBACK_CODES = _ROW_CODES | {Code.NOT_FOUND.value[0]}


def _row_complaint(one: Call, status: status_pb2.Status) -> str:
    allowed = _ROLLBACK_CODES if one.method.name.startswith("Rollback") else _ROW_CODES
    return "" if status.code in allowed else f"a row has code {status.code}: {status.message}"
