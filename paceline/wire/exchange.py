"""Requests to a peer over streams that stay open. In Python a message on an open stream takes half the time of a call.

Owns the streams of one method. A request takes an unused stream; one that must follow another takes that one's stream,
and need not wait for its answer. An unused stream is ended after a while. A request that fails ends its stream with the
status that a separate call would have had; those behind it are asked again on another. Between answers a peer may send
what nobody asked for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.codec.rounds import is_unasked
from paceline.errors import WrongAnswer
from paceline.tasks import kept_task, outlasting
from paceline.wire.status import CHANNEL_CLOSED, is_of_stub

UNUSED_S = 30.0
"""Seconds after which a stream without requests is ended."""
OnEnd = Callable[[WrongAnswer | None], None]
"""Called when a stream has ended; with an error, if the peer sent something that nobody asked for."""


def _pass_over(*told: Any) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class _Names:
    """What a request is about."""

    used: frozenset[str]
    ended: frozenset[str]
    """What is over before it is served."""


class Exchange:
    """Streams of one method. Its requests must be safe to repeat and have a field `context`, a `RequestContext`."""

    def __init__(self, open_stream: Callable[[], Any], take_unasked: Callable[[Any], None] = _pass_over) -> None:
        """`open_stream` is a stub's method that returns a `grpc.aio.StreamStreamCall`.

        `take_unasked` gets the messages that are no answers.
        """
        self._open_stream = open_stream
        self._take_unasked = take_unasked
        self._on_end: OnEnd = _pass_over
        self._kept: list[tuple[float, _Stream]] = []
        """Idle streams with the times of their last answers, oldest first. The newest is used first."""
        self._busy: set[_Stream] = set()
        """Streams with requests under way."""
        self._trimming: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def tell_ends(self, on_end: OnEnd) -> None:
        """Have `on_end` called whenever a stream has ended, by whomever."""
        self._on_end = on_end

    async def ask(
        self, request: Any, timeout_s: float, names: Collection[str] = (), ended: Collection[str] = ()
    ) -> Any:
        """Return the answer, or None when it cannot be parsed. Raise AioRpcError as a call would.

        Requests that share one of `names` reach the peer in the order in which they were asked. So does one that uses
        again what an earlier one `ended`, which would undo it otherwise.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._ask(request, limit, _Names(frozenset(names), frozenset(ended)))
        except TimeoutError as error:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer came within {timeout_s:g} s") from error

    def is_under_way(self, name: str) -> bool:
        """Return whether the peer may have yet to serve a request with this name, given up or not."""
        return any(name in names.used for stream in self._busy for names in stream.under_way)

    def is_ending(self, name: str) -> bool:
        """Return whether a request that ends this name is under way."""
        return any(name in names.ended for stream in self._busy for names in stream.under_way)

    async def close(self) -> None:
        """Tell the peer that nothing more will be asked."""
        if self._trimming:
            self._trimming.cancel()
        while stream := self._take():
            await stream.half_close()

    async def _ask(self, request: Any, limit: asyncio.Timeout, names: _Names) -> Any:
        while stream := await self._stream_for(names):
            try:
                return await self._ask_on(stream, request, limit, names)
            except _Gone:
                pass  # the peer may have been replaced while the stream was idle, or has refused a request before
        try:
            stream = _Stream(self._open_stream(), self._take_unasked, self._settled, self._on_end)
            return await self._ask_on(stream, request, limit, names)
        except _Gone as gone:
            raise gone.reason from None

    async def _stream_for(self, names: _Names) -> "_Stream | None":
        """Return the stream of those that a request has to follow, or else an idle one; None: it needs a new one."""
        while len(streams := [one for one in self._busy if one.is_before(names)]) > 1:
            await streams[0].quiet.wait()  # only one stream keeps an order
        return streams[0] if streams else self._take()

    async def _ask_on(self, stream: "_Stream", request: Any, limit: asyncio.Timeout, names: _Names) -> Any:
        request.context.timeout_s = max(0.0, (limit.when() or 0.0) - asyncio.get_running_loop().time())
        self._busy.add(stream)
        return await stream.ask(request, names)

    def _settled(self, stream: "_Stream") -> None:
        """Keep a stream whose requests have all been answered for later ones."""
        self._busy.discard(stream)
        if stream.is_over:
            return
        loop = asyncio.get_running_loop()
        self._kept.append((loop.time(), stream))
        if self._trimming is None:
            self._trimming = loop.call_later(UNUSED_S, self._end_unused)

    def _end_unused(self) -> None:
        loop = asyncio.get_running_loop()
        while self._kept and self._kept[0][0] + UNUSED_S <= loop.time():
            _, stream = self._kept.pop(0)
            kept_task(stream.half_close(), self._ending)
        next_s = self._kept[0][0] + UNUSED_S if self._kept else None
        self._trimming = None if next_s is None else loop.call_at(next_s, self._end_unused)

    def _take(self) -> "_Stream | None":
        """Return the newest idle stream that is not known to have ended; None without one."""
        while self._kept:
            _, stream = self._kept.pop()
            if not stream.is_over:
                return stream
        return None


@dataclass(eq=False, slots=True)
class _Asked:
    """A request under way."""

    names: _Names
    answer: asyncio.Future[Any]
    """Cancelled for a request that was given up: the peer serves it all the same."""


class _Stream:
    """A stream and the requests on it that wait for their answers, in their order. It is read as long as it lasts."""

    def __init__(
        self,
        call: Any,
        take_unasked: Callable[[Any], None],
        on_settled: Callable[["_Stream"], None],
        on_end: OnEnd,
    ) -> None:
        """`on_settled` is called whenever no request is under way any more, `on_end` when nothing more can be read."""
        self._call = call
        self._take_unasked = take_unasked
        self._on_settled = on_settled
        self._on_end = on_end
        self._waiting: deque[_Asked] = deque()
        self._sending = asyncio.Lock()
        self._sends: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self.quiet = asyncio.Event()
        """Set while no request is under way."""
        self._reading = asyncio.create_task(self._read())

    @property
    def is_over(self) -> bool:
        return self._has_ended or bool(self._call.done())

    @property
    def under_way(self) -> Iterator[_Names]:
        """Names of the requests under way."""
        return (one.names for one in self._waiting)

    def is_before(self, names: _Names) -> bool:
        """Return whether a request under way has to reach the peer before one with these names."""
        return any(not (names.used.isdisjoint(one.used) and names.used.isdisjoint(one.ended)) for one in self.under_way)

    async def ask(self, request: Any, names: _Names) -> Any:
        """Send a request and return its answer. Raise _Gone when the stream did not take it, or AioRpcError."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asked = _Asked(names, answer)
        self._waiting.append(asked)
        self.quiet.clear()
        sending = self._sent(request, asked)
        try:
            # gRPC cancels a stream with a task that writes to it, so where others wait, another task writes.
            await (sending if len(self._waiting) == 1 else outlasting(sending, self._sends))
            return await answer
        except asyncio.CancelledError:
            answer.cancel()
            if all(one.answer.done() for one in self._waiting):
                self._stop()
                for send in self._sends:
                    send.cancel()  # gRPC lets a write wait for ever that waited for a stream to begin
            raise
        except Exception:
            answer.cancel()
            self._stop()
            raise

    async def _sent(self, request: Any, asked: _Asked) -> None:
        """Send a request after those before it, unless it has been given up: then no answer will come for it."""
        async with self._sending:
            is_sent = False
            try:
                if self.is_over or not asked.answer.cancelled():
                    await _send(self._call, request)
                    is_sent = True
            finally:
                if not is_sent and asked in self._waiting:
                    self._waiting.remove(asked)
                    self._settle()

    async def half_close(self) -> None:
        await half_close(self._call)

    async def _read(self) -> None:
        failure: Exception = _Gone()
        wrong: WrongAnswer | None = None
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if is_unasked(message):
                    self._take_unasked(message)
                    continue
                if not self._answer(message) and not self._has_ended:  # else it was asked for, and given up
                    wrong = WrongAnswer("a message came that nobody had asked for; the peer is not compatible")
                if wrong or message is None:  # it may be no answer: whose the next ones are is not known any more
                    self._call.cancel()
                    break
        except asyncio.CancelledError:
            # Closing the channel cancels whoever reads, and so whoever waits for an answer.
            for one in self._waiting:
                one.answer.cancel()
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
        except grpc.aio.AioRpcError as error:
            failure = _gone(error) if is_of_stub(error) or error.code() is grpc.StatusCode.UNAVAILABLE else error
        except Exception as error:
            failure = error
        finally:
            self._end(failure)
            self._on_end(wrong)

    def _answer(self, message: Any) -> bool:
        """Give an answer to the first request that waits, which may have been given up. Return whether one waits."""
        if not self._waiting:
            return False
        answer = self._waiting.popleft().answer
        if not answer.done():
            answer.set_result(message)
        self._settle()
        return True

    def _stop(self) -> None:
        self._call.cancel()
        self._end(_Gone())

    def _end(self, failure: Exception) -> None:
        """Fail the requests that wait; no more are taken. What the peer says is of the first: it served no other."""
        self._has_ended = True
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            if not one.answer.done():
                one.answer.set_exception(failure)
            if isinstance(failure, grpc.aio.AioRpcError):
                failure = _Gone()
        self._settle()

    def _settle(self) -> None:
        if not self._waiting and not self.quiet.is_set():
            self.quiet.set()
            self._on_settled(self)


async def _send(stream: Any, request: Any) -> None:
    """Send a request. Raise _Gone when the stream did not take it."""
    try:
        await stream.write(request)
    except asyncio.InvalidStateError as error:
        raise _Gone from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        raise _Gone(_error(grpc.StatusCode.UNAVAILABLE, CHANNEL_CLOSED)) from error
    except grpc.aio.AioRpcError as error:
        raise _gone(error) from error


async def half_close(stream: Any) -> None:
    """Tell the peer that no more requests will come on a stream."""
    with suppress(Exception):  # gRPC raises various errors when the stream has already ended
        await stream.done_writing()


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Gone(Exception):
    """The stream took no request, or its peer is unavailable. Another stream may work."""

    def __init__(self, reason: grpc.aio.AioRpcError | None = None) -> None:
        self.reason = reason or _error(grpc.StatusCode.UNAVAILABLE, "the peer ended the stream without an answer")


def _gone(error: grpc.aio.AioRpcError) -> _Gone:
    return _Gone(None if is_of_stub(error) else error)
