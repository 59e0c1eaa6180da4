"""Recent outputs of all generations: what followed the same tokens in any of them.

What it guesses tells of other clients' outputs, so it is off unless an operator turns it on: SECURITY.md says what a
client could learn. Knows nothing of clients, generations or prompts. Rounds alone may use it, in their one thread.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence

from coordinator.drafting.indexed_text import COMPARED, GrowingText
from coordinator.drafting.native import GuessRoom, Library
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess

TEXT_COUNT = 4
"""The oldest tokens leave a quarter at a time; a search looks into each text."""
BORDER = -1
"""Stands between outputs; no context contains it."""


class SharedSuffixes:
    """At most `token_limit` tokens of the latest outputs, for 20 bytes a token."""

    def __init__(self, library: Library, token_limit: int) -> None:
        if token_limit < 2 * TEXT_COUNT:
            raise ValueError(f"token_limit is {token_limit}; give at least {2 * TEXT_COUNT}, or share no suffixes")
        self._library = library
        self._text_room = token_limit // TEXT_COUNT
        self._texts: deque[GrowingText] = deque(maxlen=TEXT_COUNT)
        """The latest first."""
        self._texts_at = (ctypes.c_void_p * 0)()
        self._room = GuessRoom()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add an output that ended. Of a very long one only the end is kept."""
        kept = [*token_ids[-(self._text_room - 1) :], BORDER]
        if not self._texts or len(kept) > self._texts[0].left_count:
            self._texts.appendleft(GrowingText(self._library, self._text_room))
            self._texts_at = (ctypes.c_void_p * len(self._texts))(*(one.at for one in self._texts))
        self._texts[0].extend(kept)

    def guess(self, context: TokenList, most: int) -> Guess | None:
        """Return at most `most` tokens that may follow `context`; None: no output contains its end."""
        latest = array("i", context[max(0, len(context) - COMPARED) :])
        texts = self._texts_at, len(self._texts_at)
        self._library.guess_of_texts(*texts, latest.tobytes(), len(latest), most, self._room.at)
        guess = self._room.guess()
        return _up_to_border(guess) if guess and BORDER in guess.token_ids else guess


def _up_to_border(guess: Guess) -> Guess | None:
    """Return the tokens before the end of their output; None: most outputs end here."""
    count = guess.token_ids.index(BORDER)
    return Guess(guess.token_ids[:count], guess.match_length, guess.shares[:count]) if count else None
