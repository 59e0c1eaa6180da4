"""The stream that a client reads: the pieces of all outputs of its request, as rounds commit them.

Owns the committed tokens that are not read yet. A slow reader gets fewer and larger pieces. A generation with too many
unread tokens pauses: until they are read it costs no passes and no memory. A prompt, where it is sent, comes before
all output.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from paceline.errors import PacelineError
from paceline.types import GenerationFinish, OutputPiece, OutputToken, RoundSummary

UNREAD_TOKENS = 1024
"""A generation pauses when more of its tokens are unread."""


class _Unread:
    """The unread part of one output."""

    def __init__(self) -> None:
        self.tokens: list[OutputToken] = []
        self.finish: GenerationFinish | None = None
        self.rounds: deque[tuple[int, RoundSummary]] = deque()
        """Rounds to be told, with the count of tokens that each committed."""

    def take(self, completion_index: int) -> OutputPiece:
        """Return all, or what one round committed where rounds are told."""
        if not self.rounds:
            return OutputPiece(tuple(self.tokens), self.finish, completion_index)
        count, told = self.rounds.popleft()
        tokens, self.tokens = self.tokens[:count], self.tokens[count:]
        return OutputPiece(tuple(tokens), None if self.rounds else self.finish, completion_index, round=told)


class Stream:
    def __init__(self, output_count: int = 1, *, sends_prompt: bool = False) -> None:
        """With `sends_prompt`, nothing is read before `put_prompt`."""
        self._unfinished_count = output_count
        self._sends_prompt = sends_prompt
        self._prompt: tuple[OutputToken, ...] = ()
        # A dict keeps the order: the output that has waited longest is read first.
        self._unread: dict[int, _Unread] = {}
        self._error: PacelineError | None = None
        self._put = asyncio.Event()
        self._on_room: set[Callable[[], None]] = set()

    def put(self, event: OutputPiece | PacelineError) -> None:
        if isinstance(event, PacelineError):
            self._error = self._error or event
        else:
            unread = self._unread.setdefault(event.completion_index, _Unread())
            unread.tokens += event.tokens
            unread.finish = event.finish
            if event.round:
                unread.rounds.append((len(event.tokens), event.round))
        self._put.set()

    def put_prompt(self, tokens: tuple[OutputToken, ...]) -> None:
        self._prompt = tokens
        self._put.set()

    def is_full(self, completion_index: int) -> bool:
        """Return whether so much of an output is unread that its generation should pause."""
        unread = self._unread.get(completion_index)
        return unread is not None and len(unread.tokens) > UNREAD_TOKENS

    def tell_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called whenever an output is no longer full."""
        self._on_room.add(on_room)

    async def pieces(self) -> AsyncIterator[OutputPiece]:
        """Yield pieces until every output has its finish.

        A piece is all of an output that was not read yet; of one round, where rounds are told.

        Raise the error that ended an output early, after all pieces that came before it.
        """
        if self._sends_prompt:
            while not self._prompt:
                await self._next_put()
            tokens, self._prompt = self._prompt, ()
            yield OutputPiece((), prompt_tokens=tokens)
        while self._unfinished_count:
            while not self._unread:
                await self._next_put()
            yield self._take(next(iter(self._unread)))

    async def _next_put(self) -> None:
        """Wait until something is put. Raise the error that was."""
        if self._error:
            raise self._error
        self._put.clear()
        await self._put.wait()

    def _take(self, completion_index: int) -> OutputPiece:
        was_full = self.is_full(completion_index)
        unread = self._unread.pop(completion_index)
        piece = unread.take(completion_index)
        if unread.rounds:
            self._unread[completion_index] = unread
        if piece.finish:
            self._unfinished_count -= 1
        if was_full and not self.is_full(completion_index):
            for on_room in self._on_room:
                on_room()
        return piece
