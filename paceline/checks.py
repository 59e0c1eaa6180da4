"""What makes a row wrong whatever the cache holds: draft and target service reject the same in the same words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from paceline.errors import DuplicateSequence, InvalidRequest, PacelineError

MAX_SEQUENCE_ID_LENGTH = 128
MAX_ROWS = 256
"""Of a call, unless a service is told otherwise."""
DECODED_TOKENS = 16
"""Rows that lack no more committed tokens than this run whole: they are decoding, or nearly."""
MAX_DRAFT_COUNT = 64
"""Draft tokens of a sequence in a round."""
MAX_PROPOSED_COUNT = MAX_DRAFT_COUNT + 1
"""Tokens that a draft service makes for a row: drafts made ahead follow a guess of the target's own next token."""


class Row(Protocol):
    @property
    def sequence_id(self) -> str: ...
    @property
    def base_length(self) -> int: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def following_count(self) -> int: ...


RowT = TypeVar("RowT", bound=Row)


def row_errors(rows: Sequence[RowT], check: Callable[[RowT], None]) -> dict[int, PacelineError]:
    """Return an error for the index of each row that repeats a sequence or that `check` refuses."""
    errors: dict[int, PacelineError] = {}
    seen: set[str] = set()
    for index, row in enumerate(rows):
        try:
            if row.sequence_id in seen:
                raise DuplicateSequence(
                    f"sequence {row.sequence_id!r} has an earlier row in this call; send each sequence once",
                    field="sequence_id",
                )
            seen.add(row.sequence_id)
            check(row)
        except PacelineError as error:
            errors[index] = error
    return errors


@dataclass(frozen=True, slots=True)
class RowLimits:
    vocabulary_size: int
    model_max_length: int
    cache_max_length: int
    """Tokens one sequence may have when it has the cache to itself."""


def check_row_count(row_count: int, max_rows: int) -> None:
    """Raise InvalidRequest for a call that asks for nothing, or for more than a pass should be made of."""
    if not row_count:
        raise InvalidRequest("rows is empty; send one row a sequence", field="rows")
    if row_count > max_rows:
        raise InvalidRequest(
            f"rows has {row_count} entries; at most {max_rows} are taken in a call (--max-rows)", field="rows"
        )


def check_row(row: Row, limits: RowLimits, draft_count: int) -> None:
    """Raise InvalidRequest unless the row could ever be taken, with so many drafts in the cache."""
    check_sequence_id(row.sequence_id)
    if row.base_length < 0:
        raise InvalidRequest(f"base_length is {row.base_length}; it cannot be negative", field="base_length")
    if not row.token_ids:
        raise InvalidRequest(
            "token_ids is empty; send at least the last committed token, with base_length before it",
            field="token_ids",
        )
    if row.following_count < 0:
        raise InvalidRequest(
            f"following_count is {row.following_count}; it cannot be negative", field="following_count"
        )
    check_token_ids(row.token_ids, limits.vocabulary_size, "token_ids")
    final_length = row.base_length + len(row.token_ids) + row.following_count + draft_count
    for limit, what in ((limits.model_max_length, "model takes"), (limits.cache_max_length, "whole cache holds")):
        if final_length > limit:
            raise InvalidRequest(
                f"sequence {row.sequence_id!r} would grow to {final_length} tokens; the {what} {limit} at most",
                field="token_ids",
            )


def check_sequence_id(sequence_id: str) -> None:
    if not 0 < len(sequence_id) <= MAX_SEQUENCE_ID_LENGTH:
        raise InvalidRequest(
            f"sequence_id has {len(sequence_id)} characters; give it 1 to {MAX_SEQUENCE_ID_LENGTH}",
            field="sequence_id",
        )


def check_token_ids(token_ids: Sequence[int], vocabulary_size: int, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                f"{field} holds {token_id}, outside the vocabulary [0, {vocabulary_size})", field=field
            )
