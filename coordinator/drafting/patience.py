"""Whether to wait for drafts or to verify at once with those that are known, by what a second gives.

Waiting is worth it while it brings more tokens than rounds like these bring in the same time. There are two things to
wait for: the answer, which has all drafts, and one more of what is prepared, which comes one by one. All times are
measured. Knows nothing of calls.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.smoothing import smoothed
from paceline.types import ProposeRow

LEAST_SHARE = 0.4
"""Share of the drafts that must be known: with a single one, rounds are short and many, and each has its own costs."""


@dataclass(slots=True)
class _Asked:
    """The last row of a sequence."""

    at_s: float
    tokens: float = 1.0
    """To be expected of its drafts."""


@dataclass(slots=True)
class _Short:
    """A sequence of which some drafts are known."""

    count: int
    since_s: float


class Patience:
    def __init__(self, expected_tokens: Callable[[int], float]) -> None:
        """`expected_tokens` returns the tokens that a row is expected to get from so many drafts."""
        self._expected_tokens = expected_tokens
        self._call_s: float | None = None
        """Mean time of a call for drafts."""
        self._draft_s: float | None = None
        """Mean time until one more draft of a sequence is known."""
        self._round_s: float | None = None
        """Mean time of a round, and what a row of it is expected to get."""
        self._tokens: float | None = None
        self._asked: dict[str, _Asked] = {}
        self._short: dict[str, _Short] = {}

    def asked(self, rows: Sequence[ProposeRow], now_s: float) -> None:
        """Note that a round asks for drafts."""
        last = [self._asked[row.sequence_id] for row in rows if row.sequence_id in self._asked]
        if last and all(row.base_length for row in rows):
            self._round_s = smoothed(self._round_s, now_s - max(one.at_s for one in last))
            self._tokens = smoothed(self._tokens, sum(one.tokens for one in last) / len(last))
        for row in rows:
            self._asked[row.sequence_id] = _Asked(now_s)
            self._short.pop(row.sequence_id, None)

    def answered(self, rows: Sequence[ProposeRow], draft_counts: Sequence[int]) -> None:
        """Note how many drafts a round got."""
        for row, count in zip(rows, draft_counts, strict=True):
            if asked := self._asked.get(row.sequence_id):
                asked.tokens = self._expected_tokens(count)

    def called(self, call_s: float) -> None:
        """Note how long a call took from its beginning to its answer."""
        self._call_s = smoothed(self._call_s, call_s)

    def known(self, sequence_id: str, count: int, now_s: float) -> None:
        """Note how many drafts of a sequence's row are known, as often as that changes until its next row comes."""
        short = self._short.get(sequence_id)
        if short and 0 < short.count < count:
            self._draft_s = smoothed(self._draft_s, (now_s - short.since_s) / (count - short.count))
        if not short or count != short.count:
            self._short[sequence_id] = _Short(count, now_s)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._asked.pop(sequence_id, None)
            self._short.pop(sequence_id, None)

    def is_enough(self, rows: Sequence[ProposeRow], known_counts: Sequence[int], waited_s: float = 0.0) -> bool:
        """Return whether rounds of these rows do better with the known drafts now than with more of them later.

        `waited_s` is how long the call for them has been under way.
        """
        counts = [row.draft_count for row in rows]
        if sum(known_counts) < LEAST_SHARE * sum(counts):
            return False
        if all(known >= count for known, count in zip(known_counts, counts, strict=True)):
            return True
        if self._call_s is None or not self._round_s or self._tokens is None:
            return False
        more = [(max(0.0, self._call_s - waited_s), counts)]
        if self._draft_s is not None:
            one_more = [min(known + 1, count) for known, count in zip(known_counts, counts, strict=True)]
            more.append((self._draft_s, one_more))
        rate = len(rows) * self._tokens / self._round_s
        return all(self._tokens_of(later) - self._tokens_of(known_counts) <= rate * wait_s for wait_s, later in more)

    def _tokens_of(self, draft_counts: Iterable[int]) -> float:
        return sum(map(self._expected_tokens, draft_counts))
