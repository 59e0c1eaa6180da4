"""Translation of errors into statuses on the server and of statuses into errors on the client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from paceline.codec.status import error_from_pb, error_to_pb
from paceline.errors import InvalidRequest, PacelineError, PeerFailed, PeerUnavailable, WrongAnswer, as_result
from paceline.wire.handlers import Handler, WrappingInterceptor, wrap

CHANNEL_CLOSED = "the channel was closed while the call was under way"
STUB_FAILED = "Internal error from Core"
"""What gRPC's stub says by itself, with INTERNAL, where the peer took no message any more."""

log = structlog.get_logger()

DEADLINE_SLACK_S = 0.05
"""Seconds: a call that ended this close to its deadline counts as timed out. The wire's rounding is added to it."""

Deserializer = Callable[[bytes], Any]
AnswerT = TypeVar("AnswerT")


class ErrorInterceptor(WrappingInterceptor):
    """Turns exceptions into statuses, for methods of any kind except client-streaming.

    It parses requests too, because gRPC answers a malformed one with UNKNOWN and logs a traceback. A streaming method
    without a deserializer gets the raw bytes.
    """

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        deserialize = handler.request_deserializer
        guard_stream = _guard_exchange if handler.request_streaming else _guard_stream
        return wrap(
            handler._replace(request_deserializer=None),
            unary=lambda behavior: _guard_unary(behavior, deserialize),
            stream=lambda behavior: guard_stream(behavior, deserialize),
        )


def _guard_unary(behavior: Handler, deserialize: Deserializer) -> Handler:
    async def guarded(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(parsed(request, deserialize), context)
        except Exception as error:
            await abort(context, error)

    return guarded


def _guard_stream(behavior: Handler, deserialize: Deserializer | None) -> Handler:
    async def guarded(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for response in behavior(parsed(request, deserialize) if deserialize else request, context):
                yield response
        except Exception as error:
            await abort(context, error)

    return guarded


def _guard_exchange(behavior: Handler, deserialize: Deserializer | None) -> Handler:
    async def guarded(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        read = (parsed(request, deserialize) async for request in requests) if deserialize else requests
        try:
            async for response in behavior(read, context):
                yield response
        except Exception as error:
            await abort(context, error)

    return guarded


def parsed(request: bytes, deserialize: Deserializer) -> Any:
    """Return the parsed request. Raise InvalidRequest when it cannot be parsed."""
    try:
        return deserialize(request)
    except DecodeError as error:
        raise InvalidRequest("the request cannot be parsed; send the message that the method takes") from error


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    """End the call with the status of the error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    try:
        await context.abort_with_status(rpc_status.to_status(error_to_pb(as_told(error))))
    except grpc.aio.AbortError as aborted:
        # gRPC's state of the call keeps this error, and its frames know that state. Only the garbage collector would
        # end that, and with it the request, which may have megabytes. The frames are left when the loop goes on.
        asyncio.get_running_loop().call_soon(as_result, aborted)
        raise


def as_told(error: Exception) -> PacelineError:
    """Return the error that a caller is told: one that nobody expected is logged instead."""
    if isinstance(error, PacelineError):
        return error
    log.error("unexpected error in a call", exc_info=error)
    return PeerFailed("the service failed unexpectedly; its log has the details")


def code_of(error: Exception) -> grpc.StatusCode:
    """Return the status code that `abort` ends a call with."""
    return error.code if isinstance(error, PacelineError) else PeerFailed.code


def tell_end(
    context: grpc.aio.ServicerContext[Any, Any], timeout_s: float | None, on_end: Callable[[grpc.StatusCode], None]
) -> None:
    """Have `on_end` called with the status code of a call that began with `timeout_s` once it ends, however it does."""

    def ended(_: object) -> None:
        if context.done():
            on_end(context.code() or grpc.StatusCode.OK)
        else:
            on_end(cut_off_code(context.time_remaining(), timeout_s))

    context.add_done_callback(ended)  # type: ignore[arg-type]  # the stubs take a class for a function's type


def cut_off_code(remaining_s: float | None, timeout_s: float | None) -> grpc.StatusCode:
    """Return whether a call ended by cancellation or by its deadline, with `remaining_s` of its `timeout_s` left.

    The server sees the same event for both, and it may come before the deadline known here: messages take time, and
    the wire rounds timeouts up by as much as 1 %. A cancellation that late counts as a timeout.
    """
    if timeout_s is not None and remaining_s is not None and remaining_s <= DEADLINE_SLACK_S + timeout_s / 100:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the failure of a call to a peer as the matching `PacelineError`.

    Only the cancellation of this task passes unchanged. gRPC also raises CancelledError in a task that nobody cancelled
    when the channel closes during its call; unchanged, that would end whoever waits for the call.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if is_of_stub(error):
            raise PeerUnavailable("the peer was gone before it could be told all") from error
        raise error_from_pb(_status_of(error)) from error
    except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise PeerUnavailable(f"the call could not be made: {error}; open a new channel") from error
    except grpc.aio.InternalError as error:
        raise PeerFailed(f"gRPC failed: {error}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerUnavailable(CHANNEL_CLOSED) from error


def is_of_stub(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC's stub failed to write, of which the peer said nothing.

    All who wait for the stream get that failure, and it hides whatever the peer ended the stream with.
    """
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == STUB_FAILED


def answered(message: AnswerT | None) -> AnswerT:
    """Return a peer's answer. Raise WrongAnswer for None, which gRPC gives when an answer cannot be parsed."""
    if message is None:
        raise WrongAnswer("the answer cannot be parsed; the peer is not compatible")
    return message


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (DecodeError, ValueError):  # a proxy on the way added a status of its own
        status = None
    return status or status_pb2.Status(code=error.code().value[0], message=error.details() or "")
