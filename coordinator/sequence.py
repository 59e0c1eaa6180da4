"""One generation: its tokens, what each service holds of it, and the stream its client reads.

The token list is the truth; the cached lengths are hints about the services' caches. Only the coordinator changes a
sequence.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

from coordinator.output import Output
from paceline.errors import PacelineError
from paceline.types import GenerationFinish, OutputPiece, ProposeRow, Usage, VerifyRow


@dataclass(eq=False)
class Sequence:
    sequence_id: str
    token_ids: list[int]
    """Committed tokens: prompt, then output."""
    output: Output
    max_draft_count: int
    usage: Usage
    draft_cached_length: int = 0
    """Leading committed tokens that the draft service holds, as far as is known."""
    target_cached_length: int = 0
    arrival: int = 0
    """Place in the order of submission."""
    ended: bool = False
    """Finished, failed or abandoned: no more rounds."""
    _events: asyncio.Queue[OutputPiece | PacelineError] = field(default_factory=asyncio.Queue)

    def propose_row(self, draft_count: int) -> ProposeRow:
        """Ask for drafts after all committed tokens, relying on what the draft service still holds."""
        base_length = min(self.draft_cached_length, len(self.token_ids) - 1)
        return ProposeRow(self.sequence_id, base_length, tuple(self.token_ids[base_length:]), draft_count)

    def verify_row(self, draft_token_ids: tuple[int, ...]) -> VerifyRow:
        base_length = min(self.target_cached_length, len(self.token_ids) - 1)
        return VerifyRow(self.sequence_id, base_length, tuple(self.token_ids[base_length:]), draft_token_ids)

    def forget_caches(self) -> None:
        """The services were told to free it: the next round sends it whole."""
        self.draft_cached_length = self.target_cached_length = 0

    def commit(self, token_ids: Tokens[int], *, accepted_count: int, drafted_count: int) -> None:
        """Add a round's tokens, up to the one that ends the output, and send them to the client.

        Drafts past the end of the output count neither as drafted nor as accepted: nobody asked for them.
        """
        tokens = self.output.extend(token_ids, accepted_count)
        self.token_ids += [token.token_id for token in tokens]
        if self.output.finish_reason:
            drafted_count = min(drafted_count, len(tokens))
        self.usage = replace(
            self.usage,
            output_count=self.output.count,
            drafted_count=self.usage.drafted_count + drafted_count,
            accepted_count=self.usage.accepted_count + min(accepted_count, len(tokens)),
            round_count=self.usage.round_count + 1,
        )
        finish = None
        if self.output.finish_reason:
            self.ended = True
            finish = GenerationFinish(self.output.finish_reason, self.usage)
        self._events.put_nowait(OutputPiece(tuple(tokens), finish))

    def fail(self, error: PacelineError) -> None:
        """End the sequence; its client gets `error`."""
        self.ended = True
        self._events.put_nowait(error)

    async def pieces(self) -> AsyncIterator[OutputPiece]:
        """Yield pieces as rounds commit them, the last one with the finish; raise what ended the sequence early."""
        while True:
            event = await self._events.get()
            if isinstance(event, PacelineError):
                raise event
            yield event
            if event.finish:
                return
