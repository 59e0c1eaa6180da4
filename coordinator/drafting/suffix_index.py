"""The suffix index of one generation: what followed the same tokens earlier, in its prompt or its output.

Prompt lookup (Saxena, 2023) with the longest match, a vote among equal ones, and a bounded search. A long match is
followed while it goes on, and beyond the end of the text where that repeats itself. The prompt is indexed once for all
outputs of its request. Knows no other generation.
"""

from array import array

from coordinator.drafting.indexed_text import IndexedText
from coordinator.drafting.native import GuessRoom
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess


class SuffixIndex:
    """The prompt and the output of a generation. The output takes 20 bytes a token of room."""

    def __init__(self, prompt: IndexedText) -> None:
        self._library = prompt.library
        self._prompt = prompt
        self._at = self._library.suffixes_of(prompt.at)
        if self._at is None:
            raise MemoryError("no memory for the suffix index of a generation")
        self._guessed_at = len(prompt.token_ids)
        """Length of the context of the last guess: what follows it is not indexed yet."""
        self._room = GuessRoom()

    def __del__(self) -> None:
        self._library.delete_suffixes(self._at)

    def read(self, context: TokenList) -> None:
        self.guess(context, 1)

    def guess(self, context: TokenList, most: int) -> Guess | None:
        """Return at most `most` tokens that may follow `context`, the text so far; None: its end is new."""
        added = array("i", context[self._guessed_at :])
        self._guessed_at = len(context)
        if not self._library.guess(self._at, added.tobytes(), len(added), most, self._room.at):
            raise MemoryError("no memory to index an output")
        return self._room.guess()

    def ended(self, context: TokenList) -> None:
        """Nothing is kept of an output."""
