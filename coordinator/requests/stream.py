"""The stream that a client reads: the pieces of all outputs of its request, as rounds commit them.

Owns the committed tokens that are not read yet. A slow reader gets fewer and larger pieces. A generation with too many
unread tokens pauses: until they are read it costs no passes and no memory. A prompt, where it is sent, comes before
all output.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from itertools import chain

from paceline.errors import PacelineError
from paceline.types import OutputPiece, OutputToken

UNREAD_TOKENS = 1024
"""A generation pauses when more of its tokens are unread."""


class Stream:
    def __init__(self, output_count: int = 1, *, sends_prompt: bool = False) -> None:
        """With `sends_prompt`, nothing is read before `put_prompt`."""
        self._unfinished_count = output_count
        self._sends_prompt = sends_prompt
        self._prompt: tuple[OutputToken, ...] = ()
        # A dict keeps the order: the output that has waited longest is read first.
        self._unread: dict[int, list[OutputPiece]] = {}
        """Pieces of each output."""
        self._unread_counts: dict[int, int] = {}
        """Tokens of these."""
        self._error: PacelineError | None = None
        self._on_put: Callable[[], None] = lambda: None
        self._on_room: set[Callable[[], None]] = set()

    def put(self, event: OutputPiece | PacelineError) -> None:
        if isinstance(event, PacelineError):
            self._error = self._error or event
        else:
            index = event.completion_index
            self._unread.setdefault(index, []).append(event)
            self._unread_counts[index] = self._unread_counts.get(index, 0) + len(event.tokens)
        self._on_put()

    def put_prompt(self, tokens: tuple[OutputToken, ...]) -> None:
        self._prompt = tokens
        self._on_put()

    def tell_put(self, on_put: Callable[[], None]) -> None:
        """Have `on_put`, and nothing else, called whenever there may be something to read."""
        self._on_put = on_put

    def is_full(self, completion_index: int) -> bool:
        """Return whether so much of an output is unread that its generation should pause."""
        return self._unread_counts.get(completion_index, 0) > UNREAD_TOKENS

    def tell_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called whenever an output is no longer full."""
        self._on_room.add(on_room)

    @property
    def has_more(self) -> bool:
        """Whether output, or the error that ended it, was not taken yet."""
        return bool(self._unread or self._error)

    @property
    def is_over(self) -> bool:
        """Whether every output was read with its finish."""
        return not self._unfinished_count

    async def pieces(self) -> AsyncGenerator[OutputPiece, None]:
        """Yield pieces until every output has its finish.

        Raise the error that ended an output early, after all pieces that came before it.
        """
        put = asyncio.Event()
        self.tell_put(put.set)
        while not self.is_over:
            put.clear()
            if pieces := self.take():
                yield _joined(pieces)
            else:
                await put.wait()

    def take(self) -> list[OutputPiece]:
        """Return the pieces of one output that can be sent now as one; none if there are none.

        They are all that was not read yet of it; those of one round, where rounds are told.

        Raise the error that ended an output early, if nothing comes before it.
        """
        if self._sends_prompt:
            if self._prompt:
                prompt, self._prompt, self._sends_prompt = self._prompt, (), False
                return [OutputPiece((), prompt_tokens=prompt)]
        elif self._unread:
            return self._take(next(iter(self._unread)))
        if self._error:
            raise self._error
        return []

    def _take(self, completion_index: int) -> list[OutputPiece]:
        pieces, count = self._unread.pop(completion_index), self._unread_counts.pop(completion_index)
        left_count = 0
        if pieces[0].round and len(pieces) > 1:
            self._unread[completion_index] = pieces[1:]
            left_count = self._unread_counts[completion_index] = count - len(pieces[0].tokens)
            pieces = pieces[:1]
        if pieces[-1].finish:
            self._unfinished_count -= 1
        if count > UNREAD_TOKENS >= left_count:
            for on_room in self._on_room:
                on_room()
        return pieces


def _joined(pieces: list[OutputPiece]) -> OutputPiece:
    if len(pieces) == 1:
        return pieces[0]
    return replace(pieces[-1], tokens=tuple(chain.from_iterable(piece.tokens for piece in pieces)))
