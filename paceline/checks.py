"""Checks of rows and sampling parameters, shared by coordinator and model services so that they refuse alike.

Knows nothing of what a cache holds.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from paceline.errors import DuplicateSequence, InvalidRequest, PacelineError, as_result
from paceline.types import ChoiceRule, SamplingParameters

MAX_SEQUENCE_ID_LENGTH = 128
MAX_ROWS = 256
"""Default for the most rows of a call."""
MOST_LANES = 16
"""Most groups that a coordinator has in flight at a target: as many as a long pipeline has stages."""
DECODED_TOKENS = 16
"""Rows that lack at most this many committed tokens run whole, because they are decoding or nearly so."""
MAX_DRAFT_COUNT = 64
"""Most draft tokens of a generation in a round."""
MAX_PROPOSED_COUNT = MAX_DRAFT_COUNT + 1
"""Most tokens that a draft service makes for a row."""
MAX_FURTHER_COUNT = 8
"""Most further rounds that a target runs by itself after one."""
MAX_PREPARED_COUNT = 256
"""Most tokens that a draft service prepares for a row."""
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Most characters of all stop strings of a request together: every output is searched for each string."""
MAX_STOP_TOKEN_IDS = 1024
"""Limited because every row of every round carries them."""
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 0.001
"""Least temperature other than 0. Logits divided by less would leave the range of float32."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_BIAS = 1000.0


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
    """Return errors by row index, for each row that repeats a sequence or that `check` refuses."""
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
            errors[index] = as_result(error)
    return errors


@dataclass(frozen=True, slots=True)
class RowLimits:
    vocabulary_size: int
    model_max_length: int
    cache_max_length: int
    """Most tokens of a sequence that has the cache to itself."""


def check_row_count(row_count: int, max_rows: int) -> None:
    """Raise InvalidRequest for a call without rows or with more than `max_rows`."""
    if not row_count:
        raise InvalidRequest("rows is empty; send one row a sequence", field="rows")
    if row_count > max_rows:
        raise InvalidRequest(
            f"rows has {row_count} entries; at most {max_rows} are taken in a call (--max-rows)", field="rows"
        )


def check_row(row: Row, limits: RowLimits, draft_count: int) -> None:
    """Raise InvalidRequest when the row could never be taken. `draft_count` draft tokens need room in the cache too."""
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


def check_sampling(sampling: SamplingParameters, vocabulary_size: int) -> None:
    """Raise InvalidRequest, naming the field, its value and its range."""
    if sampling.temperature != 0:
        _check_range("temperature", sampling.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, instead="0, or ")
    _check_range("top_k", sampling.top_k, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0, 1, above=True)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("min_new_tokens", sampling.min_new_tokens, 0, math.inf)
    token_ids = [token_id for token_id, _ in sampling.logit_bias]
    if len(token_ids) > MAX_LOGIT_BIASES:
        raise _refusal("logit_bias", f"has {len(token_ids)} entries; give {MAX_LOGIT_BIASES} at most")
    if len(set(token_ids)) < len(token_ids):
        raise _refusal("logit_bias", "names a token twice; name each once")
    check_token_ids(token_ids, vocabulary_size, "sampling.logit_bias")
    for _, bias in sampling.logit_bias:
        _check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)


def check_rule(rule: ChoiceRule, vocabulary_size: int) -> None:
    """Check the sampling parameters and the rest of a choice rule. Raise InvalidRequest."""
    check_sampling(rule.sampling, vocabulary_size)
    if rule.prompt_count < 0:
        raise InvalidRequest(f"prompt_count is {rule.prompt_count}; it cannot be negative", field="rule.prompt_count")
    check_token_ids(rule.end_token_ids, vocabulary_size, "rule.end_token_ids")
    check_min_new_tokens(rule.sampling, set(rule.end_token_ids), vocabulary_size)


def check_min_new_tokens(sampling: SamplingParameters, end_token_ids: Collection[int], vocabulary_size: int) -> None:
    """Raise InvalidRequest when `min_new_tokens` would leave no token to choose. `end_token_ids` has no duplicates."""
    if sampling.min_new_tokens and len(end_token_ids) >= vocabulary_size:
        raise _refusal(
            "min_new_tokens",
            f"is {sampling.min_new_tokens}, but every token of the vocabulary ends the output; drop it",
        )


def check_top_logprob_count(count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprob_count is {count}; give 0 to {MAX_TOP_LOGPROBS}, or leave it out", field="top_logprob_count"
        )


def _check_range(field: str, value: float, low: float, high: float, *, above: bool = False, instead: str = "") -> None:
    """Raise InvalidRequest for NaN or outside the range. `above` excludes `low`; `instead` is also allowed."""
    if not (low <= value <= high) or (above and value == low):
        lowest = f"above {low:g}" if above else f"at least {low:g}"
        highest = "" if high == math.inf else f" and at most {high:g}"
        raise _refusal(field, f"is {value:g}; give {instead}{lowest}{highest}")


def _refusal(field: str, words: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {words}", field=f"sampling.{field}")
