"""The stream that a client reads: the pieces of all outputs of its request, as rounds commit them.

Owns the committed tokens that are not read yet. A slow reader gets fewer and larger pieces. A generation with too many
unread tokens pauses: until they are read it costs no passes and no memory. A prompt, where it is sent, comes before
all output.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

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
        """Pieces of each output: one that grows, or one for each round where rounds are told."""
        self._error: PacelineError | None = None
        self._on_put: Callable[[], None] = lambda: None
        self._on_room: set[Callable[[], None]] = set()

    def put(self, event: OutputPiece | PacelineError) -> None:
        if isinstance(event, PacelineError):
            self._error = self._error or event
        elif (unread := self._unread.get(event.completion_index)) is None:
            self._unread[event.completion_index] = [event]
        elif event.round:
            unread.append(event)
        else:
            unread[-1] = replace(unread[-1], tokens=unread[-1].tokens + event.tokens, finish=event.finish)
        self._on_put()

    def put_prompt(self, tokens: tuple[OutputToken, ...]) -> None:
        self._prompt = tokens
        self._on_put()

    def tell_put(self, on_put: Callable[[], None]) -> None:
        """Have `on_put`, and nothing else, called whenever there may be something to read."""
        self._on_put = on_put

    def is_full(self, completion_index: int) -> bool:
        """Return whether so much of an output is unread that its generation should pause."""
        unread = self._unread.get(completion_index)
        return unread is not None and sum(len(piece.tokens) for piece in unread) > UNREAD_TOKENS

    def tell_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called whenever an output is no longer full."""
        self._on_room.add(on_room)

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
            if piece := self.next_piece():
                yield piece
            else:
                await put.wait()

    def next_piece(self) -> OutputPiece | None:
        """Return the next piece that can be read now; None without one.

        A piece is all of an output that was not read yet; of one round, where rounds are told.

        Raise the error that ended an output early, if nothing comes before it.
        """
        if self._sends_prompt:
            if self._prompt:
                prompt, self._prompt, self._sends_prompt = self._prompt, (), False
                return OutputPiece((), prompt_tokens=prompt)
        elif self._unread:
            return self._take(next(iter(self._unread)))
        if self._error:
            raise self._error
        return None

    def _take(self, completion_index: int) -> OutputPiece:
        was_full, unread = self.is_full(completion_index), self._unread.pop(completion_index)
        piece = unread.pop(0)
        if unread:
            self._unread[completion_index] = unread
        if piece.finish:
            self._unfinished_count -= 1
        if was_full and not self.is_full(completion_index):
            for on_room in self._on_room:
                on_room()
        return piece
