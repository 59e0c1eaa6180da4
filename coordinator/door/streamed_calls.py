"""The calls of one `GenerateStream`: begun, held and cancelled as its messages ask.

Owns which call has which name on the stream, and the tasks that end them. What is sent of them is the outbox's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import status_pb2

from coordinator.door.call import Call
from coordinator.door.field_count import check_field_count
from coordinator.door.message_size import too_large
from coordinator.door.outbox import Outbox, Sending
from coordinator.door.unread_start import begun_call_id
from paceline.codec.generation import accepted_to_pb, add_piece, request_from_pb
from paceline.codec.status import error_to_pb
from paceline.errors import (
    CallTimedOut,
    InvalidRequest,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    as_result,
)
from paceline.security.limits import LONGEST_TIMEOUT_S
from paceline.types import GenerationRequest, OutputPiece
from paceline.v1 import common_pb2
from paceline.v1 import generation_service_pb2 as pb
from paceline.wire import as_told, code_of, cut_off_code, parsed

LONG_MESSAGE_BYTES = 64 << 10
"""Messages from this size on are parsed in a thread, so that no round waits for them."""
MOST_CONTEXT_BYTES = 16 << 10
"""As gRPC takes of the metadata of a call of its own."""
CANCELLED = status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="the call was cancelled")

Begin = Callable[[str], Call]
"""Makes a call, with its caller's id if it gave one. Raises the error of a caller that may not call any more."""
AroundCall = Callable[[Any], AbstractContextManager[object]]
"""Takes a call's `RequestContext`; the call is served within its result."""


class _Running:
    """A call that has not ended."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.sending: Sending | None = None
        """None before it is queued."""
        self.is_held = False
        self.cancelled_with = CANCELLED
        """How it ends when it is cancelled."""


class _Started:
    """What a call begins with. Its request may have megabytes, so it is let go of when it was read."""

    def __init__(self, started: pb.StartedCall, byte_count: int) -> None:
        # A part of a message keeps all of it.
        self.context = common_pb2.RequestContext.FromString(started.context.SerializeToString())
        self.byte_count = byte_count
        self.echo_prompt = started.request.echo_prompt
        self._request: pb.GenerateTextRequest | None = started.request

    def read(self) -> GenerationRequest:
        assert self._request is not None
        return request_from_pb(self._request)

    def let_go(self) -> None:
        self._request = None


class StreamedCalls:
    def __init__(self, begin: Begin, around: AroundCall, most: int, most_bytes: int) -> None:
        """At most `most` calls are under way at once, and a message has at most `most_bytes`."""
        self._begin = begin
        self._around = around
        self._most = most
        self._most_bytes = most_bytes
        self._outbox = Outbox(most_bytes)
        self._running: dict[int, _Running] = {}
        self._takes_calls = True
        self._reading: asyncio.Task[None] | None = None

    def answer(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Do what the messages of the stream ask; return the messages that answer them, until all calls have ended."""
        self._reading = asyncio.create_task(self._read(requests))
        return self._outbox.messages()

    def take_no_more(self) -> None:
        """Refuse calls from now on. The answer ends with the last call under way."""
        if self._takes_calls:
            self._outbox.tell_closing()
        self._stop_taking()

    def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel all calls, because nobody reads the answer any more; return what ends them."""
        if self._reading:
            self._reading.cancel()
        ending = {running.task for running in self._running.values()}
        for task in ending:
            task.cancel()
        return ending

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for message in requests:
                await self._outbox.room()
                await self._do(message)
                del message  # it may have megabytes, and the next one may be long in coming
        except Exception as error:
            self._outbox.fail(error)
        for running in self._running.values():
            self._hold(running, is_held=False)  # nobody could let it go on any more
        self._stop_taking()

    def _stop_taking(self) -> None:
        self._takes_calls = False
        if not self._running:
            self._outbox.finish()

    async def _do(self, message: bytes) -> None:
        """Do what a message asks. Raise InvalidRequest for one that is senseless: it ends the stream."""
        read = partial(_action, message)
        asked, unread = read() if len(message) < LONG_MESSAGE_BYTES else await asyncio.to_thread(read)
        running = self._running.get(asked.call_id)
        match asked.WhichOneof("action"):
            case "start" if running:
                raise InvalidRequest(f"call_id {asked.call_id} is that of a call that has not ended", field="call_id")
            case "start":
                started = _Started(asked.start, len(message))
                refusal = unread or self._refusal() or _refused_context(started.context)
                task = asyncio.create_task(self._run(asked.call_id, started, refusal))
                self._running[asked.call_id] = _Running(task)
            case "cancel":
                if running:
                    running.task.cancel()
            case "hold":
                if running:
                    self._hold(running, is_held=asked.hold)
            case _ if len(UnknownFieldSet(asked)):
                self._refuse_action(asked.call_id, running)
            case _:
                raise InvalidRequest("a message asks for nothing; set start, cancel or hold", field="action")

    def _refuse_action(self, call_id: int, running: _Running | None) -> None:
        """End a call of which a newer caller asks what is not known here: it could not tell that it was passed over."""
        refusal = error_to_pb(
            InvalidRequest(
                "this coordinator does not know what is asked of the call; upgrade it, or set start, cancel or hold",
                field="action",
            )
        )
        if running:
            running.cancelled_with = refusal
            running.task.cancel()
        else:
            self._outbox.add(pb.CallUpdate(call_id=call_id, ended=refusal))

    def _hold(self, running: _Running, *, is_held: bool) -> None:
        running.is_held = is_held
        if running.sending:
            self._outbox.hold(running.sending, is_held)

    def _refusal(self) -> PacelineError | None:
        """Return why a call that begins now is refused; None: it is not."""
        if not self._takes_calls:
            return PeerUnavailable("this stream takes no more calls; open another")
        if len(self._running) >= self._most:
            return Overloaded(f"{self._most} calls of this stream are under way; wait for one, or open another stream")
        return None

    async def _run(self, call_id: int, started: "_Started", refusal: PacelineError | None) -> None:
        """Serve a call, and send how it ended if its output does not tell that."""
        status: status_pb2.Status | None = None
        try:
            with self._around(started.context):
                await self._serve(call_id, started, refusal)
        except asyncio.CancelledError:
            status = self._running[call_id].cancelled_with
        except Exception as error:
            status = error_to_pb(as_told(error))
        running = self._running.pop(call_id)
        if running.sending:
            self._outbox.end(running.sending)
        if status and not (running.sending and running.sending.has_told_end):
            self._outbox.add(pb.CallUpdate(call_id=call_id, ended=status))
        if not (self._takes_calls or self._running):
            self._outbox.finish()

    async def _serve(self, call_id: int, started: "_Started", refusal: PacelineError | None) -> None:
        call, code = self._begin(started.context.request_id), grpc.StatusCode.OK
        timeout_s, clock = None, asyncio.get_running_loop().time
        began_s = clock()
        try:
            if refusal:
                raise refusal
            timeout_s = _timeout_s(started.context)
            async with asyncio.timeout(timeout_s):
                await self._send(call_id, call, started, timeout_s)
        except asyncio.CancelledError:
            # A caller whose own clock says first that time is up cancels the call.
            code = cut_off_code(timeout_s and timeout_s - (clock() - began_s), timeout_s)
            raise
        except Exception as error:
            failure = CallTimedOut("the request's deadline passed") if isinstance(error, TimeoutError) else error
            code, shown = code_of(failure), call.failed(failure)
            raise shown from error
        finally:
            call.end(code)

    async def _send(self, call_id: int, call: Call, started: "_Started", timeout_s: float | None) -> None:
        """Queue the call, and send all of its output."""
        accepted = await call.queue(started.read, started.byte_count, timeout_s)
        started.let_go()
        # Before any token: a client that loses the stream later can resume with this.
        self._outbox.add(pb.CallUpdate(call_id=call_id, response=accepted_to_pb(accepted)))
        if started.echo_prompt:
            async with aclosing(call.stream.pieces()) as pieces:
                prompt = await anext(pieces)
            # A long prompt with its log-probabilities takes a third of a second: rounds go on meanwhile.
            self._outbox.add(await asyncio.to_thread(_prompt_update, call_id, prompt, self._most_bytes))
        running = self._running[call_id]
        running.sending = self._outbox.send(call_id, call, is_held=running.is_held)
        await running.sending.wait()


def _refused_context(context: common_pb2.RequestContext) -> PacelineError | None:
    """Return why a call with this context is refused; None: it is not. It is kept as long as the call."""
    if (byte_count := context.ByteSize()) <= MOST_CONTEXT_BYTES:
        return None
    return InvalidRequest(f"context has {byte_count} bytes; give {MOST_CONTEXT_BYTES} at most", field="context")


def _timeout_s(context: common_pb2.RequestContext) -> float | None:
    """Return the seconds that a call may take; None: any. Raise InvalidRequest where that is no such number."""
    if not context.HasField("timeout_s"):
        return None
    timeout_s = context.timeout_s
    if not 0 <= timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"context.timeout_s is {timeout_s}; give 0 to {LONGEST_TIMEOUT_S:.0f}, or leave it out for no limit",
            field="context.timeout_s",
        )
    return timeout_s


def _prompt_update(call_id: int, prompt: OutputPiece, most_bytes: int) -> pb.CallUpdate:
    """Write a prompt that is sent back. Raise MessageTooLarge if no message can carry it: it would end the stream."""
    update = pb.CallUpdate(call_id=call_id)
    add_piece(update.response, prompt, in_runs=True)
    byte_count = pb.GenerateStreamResponse(updates=[update]).ByteSize()
    if byte_count > most_bytes:
        raise too_large(byte_count, most_bytes)
    return update


def _action(message: bytes) -> tuple[pb.GenerateStreamRequest, InvalidRequest | None]:
    """Return what a message asks. With an error it begins a call, and the rest of it cannot be read.

    Raise InvalidRequest where not even that is known.
    """
    try:
        check_field_count(message, pb.GenerateStreamRequest.DESCRIPTOR)
        return parsed(message, pb.GenerateStreamRequest.FromString), None
    except InvalidRequest as error:
        call_id = begun_call_id(message, pb.GenerateStreamRequest.DESCRIPTOR)
        if call_id is None:
            raise
        return pb.GenerateStreamRequest(call_id=call_id, start=pb.StartedCall()), as_result(error)
