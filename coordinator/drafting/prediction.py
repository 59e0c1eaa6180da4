"""The output that a client expects, as a source: it goes on where the output and it agree.

After a token that differs it is aligned again: to the nearest place, from the last one that was certain, that the
output's latest two tokens stand before; if there is none near, to a place anywhere with a longer match. So it follows
inserted, deleted and replaced parts, and moved ones of some length. Knows nothing of the prompt.
"""

from operator import itemgetter

from coordinator.drafting.indexed_text import COMPARED, IndexedText
from coordinator.requests.committed_tokens import TokenList
from coordinator.requests.guess import Guess

NEAR_MATCH = 2
"""Equal tokens that a place takes near the last certain one."""
NEAR_TOKENS = 256
"""Tokens after the last certain place that are near."""
CERTAIN = 6
"""Equal tokens after which a place is certain."""
FAR_MATCH = 5
"""Equal tokens that a place anywhere else takes."""


class Prediction:
    def __init__(self, expected: IndexedText, prompt_count: int = 0) -> None:
        """`expected` is the output that is expected after so many tokens."""
        self._text = expected
        self._prompt_count = prompt_count
        self._seen_count = prompt_count
        """Tokens of prompt and output up to the last that was compared."""
        self._place: int | None = 0
        """Where the prediction goes on; None: nowhere."""
        self._match_length = 0
        """Latest tokens of the output that stand before the place."""
        self._certain_place = 0

    def read(self, context: TokenList) -> None:
        self._follow(context)

    def guess(self, context: TokenList, most: int) -> Guess | None:
        """Return at most `most` tokens that may follow prompt and output so far; None: the output does not agree.

        The time it takes depends on the number of tokens since the last call alone.
        """
        if len(context) > self._seen_count:
            self._follow(context)
        if self._place is None:
            return None
        token_ids = self._text.after(self._place, most)
        return Guess(tuple(token_ids), self._match_length, (1.0,) * len(token_ids)) if token_ids else None

    def ended(self, context: TokenList) -> None:
        """Nothing is kept of an output."""

    def _follow(self, context: TokenList) -> None:
        """Compare the output's new tokens."""
        token_ids = context[self._seen_count :]
        self._seen_count += len(token_ids)
        if self._place is not None and self._text.after(self._place, len(token_ids)) == token_ids:
            self._place += len(token_ids)
            self._match_length += len(token_ids)
        else:
            self._match_length, self._place = self._align(context[max(self._prompt_count, len(context) - COMPARED) :])
        if self._place is not None and self._match_length >= CERTAIN:
            self._certain_place = self._place

    def _align(self, latest_token_ids: list[int]) -> tuple[int, int | None]:
        """Return where the prediction goes on after the output's latest tokens, and how many of them stand before."""
        near_place = self._near_place(latest_token_ids)
        if near_place is not None:
            return NEAR_MATCH, near_place
        far = [match for match in self._text.find(latest_token_ids) if match[0] >= FAR_MATCH]
        ahead = [match for match in far if match[1] >= self._certain_place]
        return min(ahead, key=itemgetter(1), default=max(far, default=(0, None)))

    def _near_place(self, latest_token_ids: list[int]) -> int | None:
        """Return the first place after the certain one that the output's latest two tokens stand before."""
        if len(latest_token_ids) < NEAR_MATCH:
            return None
        *_, before, latest = latest_token_ids
        token_ids, place = self._text.token_ids, self._certain_place
        stop = place + NEAR_TOKENS
        while True:
            try:
                place = token_ids.index(latest, place, stop) + 1
            except ValueError:
                return None
            if place > 1 and token_ids[place - 2] == before:
                return place
