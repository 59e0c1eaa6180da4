"""Many calls of a client over one `GenerateStream`, in place of a `GenerateText` for each.

Owns the stream, which is opened when it is needed, and the names of the calls on it. A call whose pieces are not read
is held, so that it keeps no other call waiting. Knows nothing of retries: a stream that breaks fails its calls.

A message too large for gRPC ends its stream. Several calls get SharedStreamLost then, to go on without sharing,
where the one at fault learns of it and harms no other.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from itertools import count
from typing import Any

import grpc

from paceline.codec.callers import caller_to_pb
from paceline.codec.names import MOST_BYTES_KEY, MOST_CALLS_KEY
from paceline.codec.status import error_from_pb
from paceline.errors import CallTimedOut, MessageTooLarge, PacelineError, PeerUnavailable, SharedStreamLost
from paceline.request_ids import REQUEST_ID
from paceline.security.limits import MAX_MESSAGE_BYTES
from paceline.tasks import kept_task, outlasting
from paceline.v1 import common_pb2
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import answered, half_close, translated_errors

HELD_RESPONSES = 64
"""Unread responses of a call after which it is held; its output waits at the coordinator then."""

Metadata = tuple[tuple[str, str], ...]
MOST_CALLS = 1000
"""Calls of a stream after which others go to another, unless the coordinator takes fewer."""


class SharedStream:
    def __init__(self, stub: GenerationServiceStub, metadata: Callable[[], Metadata]) -> None:
        """`metadata` goes with a stream; when it changes, calls that begin go to a new one."""
        self._open: Any = stub.GenerateStream  # its type asks for an iterator of requests, and these are written
        self._metadata = metadata
        self._opened: _Opened | None = None
        """The stream that takes calls."""
        self._older: set[_Opened] = set()
        """Streams that take no more, with calls that go on."""

    async def call(
        self, request: pb.GenerateTextRequest, timeout_s: float | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[pb.GenerateTextResponse, None]:
        """Yield the responses to a request. Closing the iterator cancels the call. Raise its PacelineError."""
        others = dict(headers)
        context = common_pb2.RequestContext(timeout_s=timeout_s, request_id=others.pop(REQUEST_ID, ""))
        if caller := caller_to_pb(others):
            context.span.CopyFrom(caller)
        started = pb.StartedCall(request=request, context=context)
        loop, timed_out = asyncio.get_running_loop(), CallTimedOut(f"the output did not end within {timeout_s} s")
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(ends_at):
                opened, call = await self._start(started)
        except TimeoutError as error:
            raise timed_out from error
        expiry = ends_at is not None and loop.call_at(ends_at, call.end, timed_out)
        try:
            while response := await call.next():
                yield response
                opened.release(call)
        finally:
            if expiry:
                expiry.cancel()
            opened.leave(call)

    async def close(self) -> None:
        streams = {*self._older, self._opened} if self._opened else self._older
        await asyncio.gather(*(one.close() for one in streams))

    async def _start(self, started: pb.StartedCall) -> "tuple[_Opened, _Call]":
        """Begin a call on the stream, or on a new one if that takes no more."""
        while True:
            opened = self._current()
            if call := await opened.start(started):
                return opened, call

    def _current(self) -> "_Opened":
        metadata = self._metadata()
        if self._opened and (self._opened.metadata != metadata or self._opened.is_full):
            self._opened.take_no_more()
        if not (self._opened and self._opened.takes_calls):
            self._older = {one for one in (*self._older, self._opened) if one and not one.has_ended}
            with translated_errors():  # the channel may be closed
                self._opened = _Opened(self._open(metadata=metadata), metadata)
        return self._opened


class _Call:
    """One call, and what was received of it and is not read yet."""

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.is_held = False
        self.has_ended = False
        self.unread: deque[pb.GenerateTextResponse] = deque()
        self._error: PacelineError | None = None
        self._news = asyncio.Event()

    def put(self, response: pb.GenerateTextResponse) -> None:
        self.unread.append(response)
        self._news.set()

    def end(self, error: PacelineError | None) -> None:
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._news.set()

    async def next(self) -> pb.GenerateTextResponse | None:
        """Wait for the next response; return None at the end. Raise the error that it ended with."""
        while not self.unread:
            if self._error:
                raise self._error
            if self.has_ended:
                return None
            self._news.clear()
            await self._news.wait()
        return self.unread.popleft()


class _Opened:
    """One stream, from its opening to its end."""

    def __init__(self, stream: Any, metadata: Metadata) -> None:
        self.metadata = metadata
        self.takes_calls = True
        self._stream = stream
        self._calls: dict[int, _Call] = {}
        """Calls that the coordinator has not ended, by their names."""
        self._ids = count(1)
        self._writing = asyncio.Lock()
        self._most_calls = MOST_CALLS
        self._most_bytes = MAX_MESSAGE_BYTES
        self._telling: set[asyncio.Task[None]] = set()
        # A write that fails hides the status of the stream, such as that of a coordinator that knows no streams.
        self._begun = asyncio.create_task(self._begin())
        self._reading = asyncio.create_task(self._read())

    async def start(self, started: pb.StartedCall) -> _Call | None:
        """Begin a call. Return None when the stream takes no more, though calls are under way on it."""
        call = _Call(next(self._ids))
        message = pb.GenerateStreamRequest(call_id=call.call_id, start=started)
        self._calls[call.call_id] = call
        try:
            await asyncio.wait((self._begun,))
            if len(self._calls) > self._most_calls:
                del self._calls[call.call_id]
                return None
            self._check_size(message)
            if not self._stream.done():
                await self._written(message)
        except asyncio.InvalidStateError:
            if not self._stream.done():  # half-closed, as its channel does when certificates rotate
                del self._calls[call.call_id]
                self.takes_calls = False
                return None
        except grpc.aio.AioRpcError:
            self._break()
        except BaseException:
            self.leave(call)
            raise
        return call

    async def _begin(self) -> None:
        """Wait for what the coordinator says of the stream, or until it is lost."""
        told = dict(await self._stream.initial_metadata())
        # At least one: a stream that takes none would be opened again and again.
        self._most_calls = max(1, min(MOST_CALLS, int(told.get(MOST_CALLS_KEY, MOST_CALLS))))
        self._most_bytes = int(told.get(MOST_BYTES_KEY, MAX_MESSAGE_BYTES))

    def _check_size(self, message: pb.GenerateStreamRequest) -> None:
        if (byte_count := message.ByteSize()) > self._most_bytes:
            raise MessageTooLarge(
                f"the request has {byte_count} bytes, and the coordinator takes at most {self._most_bytes}; "
                "shorten the prompt, or have the coordinator's --max-message-bytes raised"
            )

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    @property
    def is_full(self) -> bool:
        return len(self._calls) >= self._most_calls

    def release(self, call: _Call) -> None:
        """Have a held call go on if most of it was read."""
        if call.is_held and len(call.unread) <= HELD_RESPONSES // 2:
            self._hold(call, is_held=False)

    def leave(self, call: _Call) -> None:
        """Cancel a call that has not ended."""
        if self._calls.pop(call.call_id, None):
            self._tell(pb.GenerateStreamRequest(call_id=call.call_id, cancel=pb.CancelledCall()))
        self._end_unused()

    def take_no_more(self) -> None:
        """Leave the stream to the calls that are under way on it."""
        self.takes_calls = False
        self._end_unused()

    async def close(self) -> None:
        self._stream.cancel()
        for telling in self._telling:
            telling.cancel()  # gRPC lets a write wait for ever that waited for a stream to begin
        await asyncio.wait((self._begun, self._reading, *self._telling))

    async def _read(self) -> None:
        failure: PacelineError = PeerUnavailable("the stream ended before its calls did")
        try:
            with translated_errors():
                while (message := await self._stream.read()) is not grpc.aio.EOF:
                    self._take(answered(message))
        except PacelineError as error:
            failure = error
        finally:
            self.takes_calls = False
            calls, self._calls = self._calls, {}
            if isinstance(failure, MessageTooLarge) and len(calls) > 1:
                failure = SharedStreamLost(f"a message of one of {len(calls)} calls ended their stream: {failure}")
            for call in calls.values():
                call.end(failure)

    def _take(self, message: pb.GenerateStreamResponse) -> None:
        for update in message.updates:
            call = self._calls.get(update.call_id)
            if call is None:
                continue
            if update.HasField("response"):
                call.put(update.response)
                if len(call.unread) > HELD_RESPONSES and not call.is_held:
                    self._hold(call, is_held=True)
            if update.HasField("ended"):
                del self._calls[update.call_id]
                call.end(error_from_pb(update.ended) if update.ended.code else None)
        if message.closing:
            self.take_no_more()

    def _hold(self, call: _Call, *, is_held: bool) -> None:
        call.is_held = is_held
        if call.call_id in self._calls:
            self._tell(pb.GenerateStreamRequest(call_id=call.call_id, hold=is_held))

    def _end_unused(self) -> None:
        if not (self.takes_calls or self._calls):
            self._tell(None)

    def _tell(self, message: pb.GenerateStreamRequest | None) -> None:
        """Send a message, or that no more will come, after those before it; nobody waits for that."""
        kept_task(self._told(message), self._telling)

    async def _told(self, message: pb.GenerateStreamRequest | None) -> None:
        try:
            if message:
                await self._write(message)
            else:
                await half_close(self._stream)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            self._break()  # a call that cannot be cancelled, or that is held and cannot go on, is lost with its stream

    async def _written(self, message: pb.GenerateStreamRequest) -> None:
        """Write in a task of its own: gRPC cancels a stream, and so all its calls, with a task that writes to it."""
        try:
            await outlasting(self._write(message), self._telling)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            self._break()  # the write was given up with the stream, and not by who waits for it

    async def _write(self, message: pb.GenerateStreamRequest) -> None:
        async with self._writing:
            await self._stream.write(message)

    def _break(self) -> None:
        """End the stream, which took no message, and so its calls."""
        self._stream.cancel()
