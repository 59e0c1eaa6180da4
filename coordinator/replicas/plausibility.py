"""Checks for answers that cannot be true. A peer that gives one has failed, and nothing of the answer is used.

Under the state protocol every field of an answer follows from the row, except a few that have a range.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

from paceline.errors import PacelineError, PeerUnavailable, WrongAnswer
from paceline.security.limits import LONGEST_TIMEOUT_S
from paceline.types import (
    CallTiming,
    ModelDescription,
    ModelIdentity,
    Proposal,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenLogprobs,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)

ROUNDING = 1e-3
"""Log-probability of a certain token, as rounding may leave it."""
TIME_ROUNDING_S = 1e-3
"""A time that is none may be as much below 0, for it is what others leave of a sum."""


def check_identity(trusted: ModelIdentity | None, answered: ModelIdentity) -> None:
    """Raise PeerUnavailable unless the trusted process answered; None trusts any.

    Another process of the same model does not count: it has none of the caches. Services that tell no identity all
    count as one process.
    """
    if trusted and trusted != answered:
        raise PeerUnavailable(f"what was called is gone ({trusted.words}), and another answers ({answered.words})")


def check_description(model: ModelDescription) -> None:
    """Raise WrongAnswer where a count is negative: rounds and the choice of a replica reckon with them."""
    for words, part in (("", model), ("cache.", model.cache), ("compute.", model.compute)):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, int) and value < 0:
                raise WrongAnswer(
                    f"the description cannot be true: {words}{field.name} is {value}; the peer is not compatible"
                )


def check_proposals(rows: Sequence[ProposeRow], proposals: Proposals) -> None:
    """Raise WrongAnswer unless the proposals can be answers to the rows."""
    _check_count(rows, proposals.results)
    _check_timing(proposals.timing)
    for row, result in zip(rows, proposals.results, strict=True):
        if isinstance(result, Proposal):
            length, count = row.base_length + len(row.token_ids), len(result.draft_token_ids)
            cached = range(length + count - 1, length + count) if count else range(row.base_length, length + 1)
            allowed_count = 0 if row.following_count else row.draft_count
            if count > allowed_count or result.cached_length not in cached:
                raise _lie(row.sequence_id, f"{count} drafts and {result.cached_length} cached tokens")


def check_verdicts(rows: Sequence[VerifyRow], verdicts: Verdicts, vocabulary_size: int) -> None:
    """Raise WrongAnswer unless the verdicts can be answers to the rows."""
    _check_count(rows, verdicts.results)
    _check_timing(verdicts.timing)
    for row, result in zip(rows, verdicts.results, strict=True):
        if isinstance(result, PacelineError):
            continue
        token_count = len(row.token_ids)
        if isinstance(result, Verdict):
            _check_choices(row, row.draft_token_ids, result, row.base_length + token_count, vocabulary_size)
            if result.further:
                _check_further(row, result, vocabulary_size)
        elif not row.base_length <= result.cached_length <= row.base_length + token_count:
            raise _lie(row.sequence_id, f"{result.cached_length} cached tokens")
        if result.reused_count:
            most = min(token_count, result.cached_length - row.base_length)
            if not 0 <= result.reused_count <= most:
                raise _lie(row.sequence_id, f"{result.reused_count} tokens reused of {most}")
        if result.token_logprobs:
            _check_scores(row, result, vocabulary_size)


def check_rollbacks(lengths: Sequence[SequenceLength], results: Sequence[RolledBack | PacelineError]) -> None:
    """Raise WrongAnswer unless the results can be answers to cutting sequences to these lengths."""
    _check_count(lengths, results)
    for one, result in zip(lengths, results, strict=True):
        if isinstance(result, RolledBack) and result.freed_bytes < 0:
            raise _lie(one.sequence_id, f"{result.freed_bytes} bytes freed")


def _check_further(row: VerifyRow, verdict: Verdict, vocabulary_size: int) -> None:
    """Check the verdicts of rounds that the target ran by itself after one."""
    if len(verdict.further) > row.further_count:
        raise _lie(row.sequence_id, f"{len(verdict.further)} further rounds of {row.further_count}")
    for before, one in pairwise((verdict, *verdict.further)):
        _check_choices(row, before.draft_token_ids, one, before.cached_length + 1, vocabulary_size)
        if one.reused_count or one.token_logprobs or one.further:
            raise _lie(row.sequence_id, "a further round that takes a prompt in")


def _check_choices(
    row: VerifyRow, verified: Sequence[int], verdict: Verdict, length: int, vocabulary_size: int
) -> None:
    """Check the tokens that were chosen after `length` tokens and with the drafts `verified`."""
    drafts = verdict.draft_token_ids
    if not (
        not row.following_count
        and 0 <= verdict.accepted_count <= len(verified)
        and verdict.cached_length == length + verdict.accepted_count
        and 0 <= verdict.next_token_id < vocabulary_size
        and (not drafts or len(drafts) <= row.propose_count and 0 <= min(drafts) <= max(drafts) < vocabulary_size)
    ):
        # Without the tokens, which may be of an output: the error is logged.
        raise _lie(
            row.sequence_id,
            f"{verdict.accepted_count} of {len(verified)} accepted, {verdict.cached_length} cached tokens, "
            f"{len(drafts)} drafts of {row.propose_count}, or a token beyond the vocabulary of {vocabulary_size}",
        )
    if verdict.logprobs:
        if len(verdict.logprobs) != verdict.accepted_count + 1:
            raise _lie(row.sequence_id, f"log-probabilities of {len(verdict.logprobs)} chosen tokens")
        _check_logprobs(row, verdict.logprobs, vocabulary_size)


def _check_scores(row: VerifyRow, result: VerifyOutcome, vocabulary_size: int) -> None:
    count = len(result.token_logprobs)
    if count != row.scored_count(result) or count >= len(row.token_ids):
        raise _lie(row.sequence_id, f"log-probabilities of {count} tokens, and {result.cached_length} cached tokens")
    _check_logprobs(row, result.token_logprobs, vocabulary_size)


def _check_logprobs(row: VerifyRow, logprobs: Sequence[TokenLogprobs], vocabulary_size: int) -> None:
    top_count = min(row.top_logprob_count or 0, vocabulary_size)
    if not all(_is_possible(one, top_count, vocabulary_size) for one in logprobs):
        raise _lie(row.sequence_id, f"log-probabilities above 0, or not of {top_count} tokens beside each one's own")


def _is_possible(logprobs: TokenLogprobs, top_count: int, vocabulary_size: int) -> bool:
    return (
        logprobs.logprob <= ROUNDING  # which is false of what is not a number
        and len(logprobs.top) == top_count
        and all(0 <= token_id < vocabulary_size and value <= ROUNDING for token_id, value in logprobs.top)
    )


def _check_count(rows: Sequence[object], results: Sequence[object]) -> None:
    if len(rows) != len(results):
        raise WrongAnswer(
            f"{len(rows)} rows were sent and {len(results)} results came back; the peer is not compatible"
        )


def _check_timing(timing: CallTiming) -> None:
    """Check the times of a call: one that is not a number would stay in all sums that it is added to."""
    times_s = (timing.queued_s, timing.executed_s, timing.others_s, timing.worked_s)
    if not all(-TIME_ROUNDING_S <= one <= LONGEST_TIMEOUT_S for one in times_s):
        told = ", ".join(f"{one:g}" for one in times_s)
        raise WrongAnswer(
            f"the answer's times cannot be true: queued_s, executed_s, others_s and worked_s are {told}; the peer is "
            "not compatible"
        )


def _lie(sequence_id: str, answer: str) -> WrongAnswer:
    return WrongAnswer(f"the answer for sequence {sequence_id!r} cannot be true: {answer}; the peer is not compatible")
