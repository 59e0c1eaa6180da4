"""What drafts are worth, learned from the rows that follow: a row brings the tokens that came of the drafts before it.

Knows nothing of calls and of times.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.requests.acceptance import PRIOR_RATE, Acceptance
from paceline.types import ProposeRow


@dataclass(frozen=True, slots=True)
class _Answer:
    length: int
    """Tokens of the sequence before the drafts."""
    draft_count: int


class Answered:
    """The last answers to sequences' rows, and how many of their drafts are accepted."""

    def __init__(self) -> None:
        self._last: dict[str, _Answer] = {}
        self._acceptance = Acceptance()

    def answered(self, rows: Sequence[ProposeRow], draft_counts: Sequence[int]) -> None:
        """Note how many drafts rows were answered with."""
        for row, draft_count in zip(rows, draft_counts, strict=True):
            self._last[row.sequence_id] = _Answer(_length(row), draft_count)

    def asked(self, rows: Sequence[ProposeRow]) -> None:
        """Learn from the tokens that rows bring what became of the drafts before."""
        for row in rows:
            last = self._last.pop(row.sequence_id, None)
            came = _length(row) - last.length if last else 0
            # More than the drafts and the next token came of other rounds.
            if last and 0 < came <= last.draft_count + 1:
                self._acceptance.add(came - 1, last.draft_count)

    def forget(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._last.pop(sequence_id, None)

    def tokens(self, draft_count: int) -> float:
        """Return the tokens that a row is expected to get in a round with so many drafts."""
        rate = self._acceptance.rate(PRIOR_RATE)
        return sum(rate**place for place in range(draft_count + 1))


def _length(row: ProposeRow) -> int:
    return row.base_length + len(row.token_ids)
