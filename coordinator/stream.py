"""What a client reads: the pieces of all outputs of its request, in the order rounds commit them."""

import asyncio
from collections.abc import AsyncIterator

from paceline.errors import PacelineError
from paceline.types import OutputPiece


class Stream:
    def __init__(self, output_count: int = 1) -> None:
        self._unfinished_count = output_count
        self._events: asyncio.Queue[OutputPiece | PacelineError] = asyncio.Queue()

    def put(self, event: OutputPiece | PacelineError) -> None:
        self._events.put_nowait(event)

    async def pieces(self) -> AsyncIterator[OutputPiece]:
        """Yield pieces until every output has its finish; raise what ended one of them early."""
        while self._unfinished_count:
            event = await self._events.get()
            if isinstance(event, PacelineError):
                raise event
            if event.finish:
                self._unfinished_count -= 1
            yield event
