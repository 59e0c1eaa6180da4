"""The open `GenerateStream` streams: what makes them, and what ends them.

A stream lasts as long as its caller likes. So it is told to take its calls elsewhere when the server stops, and after
a while: a coordinator that joined gets calls of older callers too.
"""

import asyncio
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

from coordinator.door.call import Call, Calls
from coordinator.door.streamed_calls import StreamedCalls
from paceline.security.access import Check, Context
from paceline.wire import check_caller, tell_end
from paceline.wire.exchanges import Around


class OpenStreams:
    def __init__(
        self,
        method: str,
        calls: Calls,
        checks: Collection[Check],
        around: Around | None,
        *,
        most: int,
        most_bytes: int,
        age_s: float,
    ) -> None:
        """Each stream has at most `most` calls at once, and takes new ones for `age_s`. `most_bytes` is for a message.

        `checks` are made for each call again: a token may have been revoked since the stream began. `around` is that of
        `Exchanges`.
        """
        self._method = method
        self._calls = calls
        self._checks = checks
        self._around = around
        self.most = most
        self.most_bytes = most_bytes
        self._age_s = age_s
        self._open: set[StreamedCalls] = set()
        self._ending: WeakSet[asyncio.Task[None]] = WeakSet()
        """Calls of streams that were cut off."""
        self._is_closed = False

    def open(self, context: Context) -> StreamedCalls:
        """Return the calls of a new stream. They are cancelled when it ends, however it does."""

        def begin(given_id: str) -> Call:
            check_caller(self._checks, self._method, context)
            return self._calls.arrived(given_id)

        calls = StreamedCalls(begin, self._around_call, self.most, self.most_bytes)
        ageing = asyncio.get_running_loop().call_later(self._age_s, calls.take_no_more)

        def end(_: object) -> None:
            ageing.cancel()
            self._open.discard(calls)
            self._ending |= calls.cancel()

        # The handler may be suspended between two messages and would not see the end.
        tell_end(context, None, end)
        self._open.add(calls)
        if self._is_closed:
            calls.take_no_more()
        return calls

    def _around_call(self, context: Any) -> AbstractContextManager[object]:
        return self._around(self._method, context) if self._around else nullcontext()

    def end_streams(self) -> None:
        """Have all open streams end with the calls under way on them."""
        for calls in self._open:
            calls.take_no_more()

    def close(self) -> None:
        """As `end_streams`, and for streams that begin later too."""
        self._is_closed = True
        self.end_streams()

    async def ended(self) -> None:
        """Wait until the calls of all streams that were cut off have ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)
