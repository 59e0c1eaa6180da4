"""What is to be sent on a stream of calls, and the messages that carry it: one for all that a round gives.

A round puts the pieces of its whole group before anything else runs, so all of them go into one message. While nobody
reads the messages, nothing is taken out of the calls' own streams: these pause their generations. gRPC ends a whole
stream for a message that is too large, so none is made: what is too large alone ends its own call. Knows nothing of how
calls begin and end.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from coordinator.door.call import Call
from coordinator.door.message_size import divided, too_large
from paceline.codec.generation import add_piece
from paceline.errors import PacelineError
from paceline.types import OutputPiece, TokenRun
from paceline.v1 import generation_service_pb2 as pb

MOST_UPDATES = 1024
"""Unsent updates from which on no more is read of a stream: a caller that does not read must not fill the memory."""
MESSAGE_TOKENS = 4096
"""Tokens after which a message is full: 1 MiB with the 20 likeliest ones in the place of each."""


class Sending:
    """The sending of one call's output."""

    def __init__(self, call_id: int, call: Call) -> None:
        self.call_id = call_id
        self.call = call
        self.stream = call.stream
        self.has_told_end = False
        """Whether a message tells that all of the output was sent."""
        self.is_over = asyncio.Event()
        self.error: PacelineError | None = None

    async def wait(self) -> None:
        """Wait until all is sent. Raise the error that ended the output early."""
        await self.is_over.wait()
        if self.error:
            raise self.error


def _nobody_waits() -> None:
    """What a stream tells while nothing of it is to be sent."""


class Outbox:
    def __init__(self, most_bytes: int) -> None:
        """A message has at most `most_bytes`."""
        self._most_bytes = most_bytes
        self._updates: deque[pb.CallUpdate] = deque()
        """What comes before output: that calls were accepted, or have ended early."""
        self._ready: dict[Sending, None] = {}
        """Calls that may have output to be sent, in order."""
        self._sendings: dict[int, Sending] = {}
        """Those of calls that have not ended, by the calls' names."""
        self._news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._owes_closing = False
        self._is_finished = False
        self._failure: Exception | None = None

    def add(self, update: pb.CallUpdate) -> None:
        self._updates.append(update)
        self._news.set()
        if len(self._updates) >= MOST_UPDATES:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait until few updates are unsent."""
        await self._has_room.wait()

    def send(self, call_id: int, call: Call, *, is_held: bool = False) -> Sending:
        """Send the output of a queued call from now on, as it comes, unless it is held."""
        self._sendings[call_id] = sending = Sending(call_id, call)
        self.hold(sending, is_held)
        return sending

    def hold(self, sending: Sending, is_held: bool) -> None:
        if is_held:
            self._pass_over(sending)
        elif not sending.is_over.is_set():
            sending.stream.tell_put(partial(self._put, sending))
            self._put(sending)

    def end(self, sending: Sending) -> None:
        """Send no more of a call, which has ended: its name may be another's."""
        self._drop(sending)
        del self._sendings[sending.call_id]

    def _drop(self, sending: Sending) -> None:
        """Send no more of a call, which ends thereby."""
        sending.is_over.set()
        self._pass_over(sending)

    def _pass_over(self, sending: Sending) -> None:
        sending.stream.tell_put(_nobody_waits)
        self._ready.pop(sending, None)

    def tell_closing(self) -> None:
        """Tell that no more calls are taken."""
        self._owes_closing = True
        self._news.set()

    def finish(self) -> None:
        """End the messages once all is sent."""
        self._is_finished = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the messages now, with an error."""
        self._failure = error
        self._news.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield messages, serialized, until `finish`. Raise the error of `fail`."""
        while True:
            self._news.clear()
            while message := self._next_message():
                for serialized in self._serialized(message):
                    yield serialized
            if self._failure:
                raise self._failure
            if self._is_finished and not self._news.is_set():
                return
            await self._news.wait()

    def _serialized(self, message: pb.GenerateStreamResponse) -> list[bytes]:
        """Return a message as it is sent: in several if it is too large, without calls with too much for any.

        All at once, before anything else runs: a call that told its end here may have to end otherwise.
        """
        # Serialized here and not by gRPC, so that its size is known at no cost.
        whole = message.SerializeToString()
        if len(whole) <= self._most_bytes:
            return [whole]
        messages, refused = divided(message, self._most_bytes, self._sendings)
        for call_id, byte_count in refused.items():
            sending = self._sendings[call_id]
            sending.has_told_end = False
            self._fail(sending, too_large(byte_count, self._most_bytes))
        return messages

    def _fail(self, sending: Sending, error: PacelineError) -> None:
        sending.error = error
        self._drop(sending)

    def _put(self, sending: Sending) -> None:
        self._ready[sending] = None
        self._news.set()

    def _next_message(self) -> pb.GenerateStreamResponse | None:
        """Return a message with as much as it may hold; None when there is nothing to be sent."""
        message, room, owed_closing = pb.GenerateStreamResponse(), MESSAGE_TOKENS, self._owes_closing
        if owed_closing:
            message.closing, self._owes_closing = True, False
        while self._updates and room > 0:
            update = self._updates.popleft()
            message.updates.append(update)
            room -= 1 + len(update.response.prompt_tokens)
        if len(self._updates) < MOST_UPDATES:
            self._has_room.set()
        for sending in list(self._ready):
            if room <= 0:
                break
            try:
                room -= self._add(message, sending, room)
            except PacelineError as error:
                self._fail(sending, error)
            if sending in self._ready:  # it has more: others come first in the next message
                self._ready[sending] = self._ready.pop(sending)
        return message if owed_closing or message.updates else None

    def _add(self, message: pb.GenerateStreamResponse, sending: Sending, room: int) -> int:
        """Add what there is of a call, up to `room` tokens; return how many. A call with more stays ready.

        Raise the error that ended the call early.
        """
        stream, added_count = sending.stream, 0
        while added_count < room:
            pieces = stream.take()
            if not pieces:
                del self._ready[sending]
                break
            update = message.updates.add(call_id=sending.call_id)
            for piece in pieces:
                sending.call.deliver(piece)
                add_piece(update.response, piece, in_runs=True)
                added_count += _token_count(piece)
            if stream.is_over:
                update.ended.SetInParent()
                sending.has_told_end = True
                self._drop(sending)
                break
            if not stream.has_more:
                del self._ready[sending]
                break
        return added_count


def _token_count(piece: OutputPiece) -> int:
    """Return the tokens of a piece, the likeliest ones in the place of each counted too."""
    tokens = piece.tokens
    if isinstance(tokens, TokenRun) or not tokens:
        return len(tokens)
    logprobs = tokens[0].logprobs
    return len(tokens) * (1 + (len(logprobs.top) if logprobs else 0))
