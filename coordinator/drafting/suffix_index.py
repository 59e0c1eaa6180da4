"""The suffix index of one generation: what followed the same tokens earlier, in its prompt or its output.

Prompt lookup (Saxena, 2023) with the longest match, a vote among equal ones, and a bounded search. The prompt is
indexed once for all outputs of its request. Knows nothing of other generations.
"""

from array import array
from collections.abc import Sequence

from coordinator.drafting.agreement import guess_of
from coordinator.drafting.indexed_text import COMPARED, IndexedText, Match, latest_matches
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess

FIRST_ROOM = 256
"""Tokens that an output's first text has room for; each further one has room for twice as many."""
FOLLOWED = 4
"""Least length of a match that is followed."""


class SuffixIndex:
    """The prompt and the output of a generation. The output takes 21 bytes a token of room."""

    def __init__(self, prompt: IndexedText) -> None:
        """`prompt` is what `index_of` returned."""
        self._texts = [prompt]
        """The latest first. The index of a full one never moves, so no round waits for that."""
        self._followed: Match | None = None
        """The longest match of the last guess, if it is long: while it goes on, no other is looked for."""
        self._guessed_at = prompt.count
        """Length of the context of the last guess: what follows it is not indexed yet."""

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output: each token once, in order."""
        added_count = self._texts[0].extend(token_ids) if len(self._texts) > 1 else 0
        while added_count < len(token_ids):
            self._texts.insert(0, self._next_text())
            added_count += self._texts[0].extend(token_ids[added_count:])

    def _next_text(self) -> IndexedText:
        """Return a text that begins with the end of the latest one, for matches that lie in both."""
        latest = self._texts[0]
        overlap = latest.token_ids[max(0, latest.count - COMPARED) : latest.count]
        room = array("i", overlap)
        room.frombytes(bytes(room.itemsize * (FIRST_ROOM << (len(self._texts) - 1))))
        return IndexedText(room, len(overlap), first_place=len(overlap))

    def guess(self, context: TokenList, most: int) -> Guess | None:
        """Return at most `most` tokens that may follow `context`, the text so far; None: its end is new."""
        added = context[self._guessed_at :]
        self._guessed_at = len(context)
        self._extend(added)
        followed = self._follow(added)
        if followed and followed[0] >= COMPARED and (guess := guess_of([followed], most)):
            self._followed = followed
            return guess
        matches = latest_matches(self._texts, context[max(0, len(context) - COMPARED) :])
        guess = guess_of(matches, most)
        self._followed = matches[0] if matches and matches[0][0] >= FOLLOWED else None
        return guess

    def _follow(self, token_ids: Sequence[int]) -> Match | None:
        """Return the last guess's match with the tokens since then, if it went on with them."""
        if self._followed is None:
            return None
        length, text, place = self._followed
        if text.after(place, len(token_ids)) != token_ids:
            return None
        return length + len(token_ids), text, place + len(token_ids)
