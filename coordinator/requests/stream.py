"""What a client reads: the pieces of all outputs of its request, as rounds commit them.

Owns what was committed and not read yet. A reader that is slow gets fewer and larger pieces, and a generation of which
too much is unread pauses: it costs no passes and no memory until it is read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from paceline.errors import PacelineError
from paceline.types import GenerationFinish, OutputPiece, OutputToken

UNREAD_TOKENS = 1024
"""A generation pauses with more of its tokens unread."""


class _Unread:
    """Of one output."""

    def __init__(self) -> None:
        self.tokens: list[OutputToken] = []
        self.finish: GenerationFinish | None = None


class Stream:
    def __init__(self, output_count: int = 1) -> None:
        self._unfinished_count = output_count
        # A dict for its order: what has waited longest is read first.
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
        self._put.set()

    def is_full(self, completion_index: int) -> bool:
        """Whether so much of an output is unread that it should pause."""
        unread = self._unread.get(completion_index)
        return unread is not None and len(unread.tokens) > UNREAD_TOKENS

    def tell_room(self, on_room: Callable[[], None]) -> None:
        """Call this when an output is full no more."""
        self._on_room.add(on_room)

    async def pieces(self) -> AsyncIterator[OutputPiece]:
        """Yield pieces until every output has its finish; raise what ended one of them early, after what came before.

        A piece is all of an output that was not read yet.
        """
        while self._unfinished_count:
            while not self._unread:
                if self._error:
                    raise self._error
                self._put.clear()
                await self._put.wait()
            yield self._take(next(iter(self._unread)))

    def _take(self, completion_index: int) -> OutputPiece:
        was_full = self.is_full(completion_index)
        unread = self._unread.pop(completion_index)
        if unread.finish:
            self._unfinished_count -= 1
        if was_full:
            for on_room in self._on_room:
                on_room()
        return OutputPiece(tuple(unread.tokens), unread.finish, completion_index)
