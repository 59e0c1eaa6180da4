"""Whether to wait for drafts or to verify at once with those that are known, by what a second gives.

With the known drafts, rounds at once give some tokens in the time of a verify; after waiting they give those of all
drafts, in a verify and the wait. Both times are measured. Knows nothing of calls.
"""

from collections.abc import Callable, Iterable, Sequence

from coordinator.smoothing import smoothed
from paceline.types import ProposeRow

LEAST_SHARE = 0.4
"""Share of the drafts that must be known: more of them come soon, for what is prepared comes one by one."""


class Patience:
    def __init__(self, expected_tokens: Callable[[int], float]) -> None:
        """`expected_tokens` returns the tokens that a row is expected to get from so many drafts."""
        self._expected_tokens = expected_tokens
        self._call_s: float | None = None
        """Mean time of a call for drafts."""
        self._elsewhere_s: float | None = None
        """Mean time of a round beside its drafts: the verify above all."""
        self._answered: dict[str, float] = {}
        """Times when sequences got their drafts last."""

    def asked(self, rows: Sequence[ProposeRow], now_s: float) -> None:
        """Note that a round asks for drafts."""
        last_s = [self._answered[row.sequence_id] for row in rows if row.sequence_id in self._answered]
        if last_s and all(row.base_length for row in rows):
            self._elsewhere_s = smoothed(self._elsewhere_s, now_s - max(last_s))

    def answered(self, rows: Sequence[ProposeRow], now_s: float) -> None:
        """Note that a round has its drafts."""
        self._answered |= dict.fromkeys((row.sequence_id for row in rows), now_s)

    def called(self, call_s: float) -> None:
        """Note how long a call took from its beginning to its answer."""
        self._call_s = smoothed(self._call_s, call_s)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._answered.pop(sequence_id, None)

    def is_enough(self, rows: Sequence[ProposeRow], known_counts: Sequence[int], waited_s: float = 0.0) -> bool:
        """Return whether rounds of these rows do better with the known drafts now than with all of them later.

        `waited_s` is how long the call for them has been under way.
        """
        if sum(known_counts) < LEAST_SHARE * sum(row.draft_count for row in rows):
            return False
        if all(known >= row.draft_count for row, known in zip(rows, known_counts, strict=True)):
            return True
        if self._call_s is None or self._elsewhere_s is None:
            return False
        now = sum(map(self._expected_tokens, known_counts))
        later = sum(self._expected_tokens(row.draft_count) for row in rows)
        wait_s = max(0.0, self._call_s - waited_s)
        return now * (self._elsewhere_s + wait_s) >= later * self._elsewhere_s
