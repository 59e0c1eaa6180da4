"""What draft services said they would choose after prefixes that may come, by sequence.

A prefix is named by its length and hash, so a choice is found in whatever piece it came, and drafts are a walk from
choice to choice. Two prefixes with one hash cost a wrong draft, which the target rejects. Knows nothing of calls.
"""

from collections.abc import Iterable

from paceline.checks import MAX_PREPARED_COUNT
from paceline.prefix_hash import extended_hash
from paceline.types import PreparedDrafts, ProposeRow

MOST_CHOICES = 4 * MAX_PREPARED_COUNT
"""Choices kept for a sequence; the oldest go first. Those of rounds that are over are among the oldest."""

_Prefix = tuple[int, int]
"""Length and hash."""


class PreparedChoices:
    def __init__(self) -> None:
        self._choices: dict[str, dict[_Prefix, int]] = {}

    def expect(self, sequence_id: str) -> None:
        """Take in choices for a sequence from now on."""
        self._choices.setdefault(sequence_id, {})

    def forget(self, sequence_ids: Iterable[str]) -> None:
        """Drop what is known of sequences, and what may still come for them."""
        for sequence_id in sequence_ids:
            self._choices.pop(sequence_id, None)

    def add(self, prepared: PreparedDrafts) -> None:
        known = self._choices.get(prepared.sequence_id)
        if known is None:
            return  # it has ended, or the peer makes it up
        length, value = prepared.length, prepared.hash
        for token_id in prepared.draft_token_ids:
            known[length, value] = token_id
            length, value = length + 1, extended_hash(value, (token_id,))
        while len(known) > MOST_CHOICES:
            del known[next(iter(known))]

    def drafts(self, row: ProposeRow) -> tuple[int, ...]:
        """Return the drafts that are known for a row, at most as many as it asks for."""
        known = self._choices.get(row.sequence_id)
        if not known or row.base_hash is None or row.following_count:
            return ()
        length, value = row.base_length + len(row.token_ids), extended_hash(row.base_hash, row.token_ids)
        found: list[int] = []
        while len(found) < row.draft_count and (token_id := known.get((length, value))) is not None:
            found.append(token_id)
            length, value = length + 1, extended_hash(value, (token_id,))
        return tuple(found)
