"""One round for one group: propose, verify, commit.

Written against protocols, which the remote clients and the tests' fakes implement. A failed draft call or draft row
costs speed and never output: the rows are verified without drafts. No call outlasts the deadlines of the group's
requests.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from coordinator.protocols import Deadline, Drafter, Verifies
from coordinator.requests.generation import Generation
from coordinator.rounds.prompt_shares import prompt_shares
from paceline.errors import (
    CacheFull,
    CallTimedOut,
    InvalidRequest,
    Overloaded,
    PacelineError,
    PeerUnavailable,
    PrefixNotCached,
)
from paceline.types import (
    CallTiming,
    HopTime,
    Prefilled,
    Proposal,
    Proposals,
    ProposeRow,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)

Clock = Callable[[], float]


@dataclass(frozen=True)
class RoundLimits:
    vocabulary_size: int
    """The target's vocabulary; a draft with a padded vocabulary may propose ids beyond it."""
    prefill_chunk_tokens: int
    """The target's chunk; a generation that lacks more tokens there first has prefill rounds, without drafts."""
    token_bytes: int = 0
    """Bytes of one token in the target's cache; 0 if unknown."""
    page_tokens: int = 0
    """Tokens of a page of the target's cache, which is freed in whole pages; 0 if unknown."""


@dataclass(frozen=True)
class RowReport:
    drafted_count: int
    accepted_count: int
    committed_count: int


@dataclass(frozen=True)
class Shortage:
    """The rows of a round that found no room in the target's cache."""

    missing_bytes: Mapping[Generation, int]
    """Bytes that each of them lacks, by generation; 0 if unknown."""
    retry_after_s: float


@dataclass(frozen=True)
class RoundReport:
    rows: list[RowReport]
    """Reports of the rows that committed tokens."""
    duration_s: float
    propose: HopTime
    verify: HopTime
    verified_count: int
    """Tokens that the rows of the verify call brought, committed and drafted."""
    draft_error: PacelineError | None
    """The error of the draft call; None if it did not fail as a whole."""
    shortage: Shortage | None
    """The rows that found no room in the target's cache, if any; their generations are unchanged."""
    is_decoding: bool = True
    """Whether no row brought a prompt or anything else that a service had lost or missed."""
    prompt_token_count: int = 0
    """Tokens that the target computed before it could decode."""
    failed: Mapping[Generation, PacelineError] = field(default_factory=dict)
    """Generations whose row failed for good, with the error."""
    prepared_count: int = 0
    """Rows whose drafts were made before they were asked for: their time says nothing of what drafts cost."""

    @property
    def drafted_count(self) -> int:
        return sum(row.drafted_count for row in self.rows)


_KEEPS_CACHE = (Overloaded, PeerUnavailable, CallTimedOut)
"""Errors of a propose row that say nothing about its cache."""

NEW_TO_DRAFT = 2
"""Tokens that the draft service has not cached after full acceptance: its last draft token and the next token."""


@dataclass(frozen=True)
class _Drafts:
    by_generation: dict[Generation, tuple[int, ...]]
    time: HopTime = HopTime()
    error: PacelineError | None = None
    was_up_to_date: bool = True
    """Whether the draft service was up to date with every row."""
    prepared_count: int = 0


async def run_round(
    group: Sequence[Generation],
    drafter: Drafter,
    verifier: Verifies,
    limits: RoundLimits,
    draft_counts: Sequence[int],
    *,
    draft_worth_s: float | None = None,
    clock: Clock = time.perf_counter,
) -> RoundReport:
    """Run one round, with at most `draft_counts` drafts by row, and commit its tokens.

    A row that fails is reported and does not stop the others. A prompt for which others leave no room waits
    (`prompt_shares`). `draft_worth_s` is the time after which drafting costs more than it saves.

    Raise the verify call's error; then no tokens were committed.
    """
    started = clock()
    wishes, shares = _taking_part(group, draft_counts, limits)
    group = list(wishes)
    deadline = Deadline(time_left_s(group, started), draft_worth_s)
    drafts = await _propose(wishes, drafter, limits, deadline, clock)
    rows = [one.verify_row(drafts.by_generation.get(one, ()), share) for one, share in zip(group, shares, strict=True)]
    began = clock()
    verdicts = await verifier.verify(rows, time_left_s(group, began))
    verify = _hop_time(clock() - began, verdicts.timing)
    reports, failed, shortage = _take(group, rows, verdicts)
    return RoundReport(
        reports,
        clock() - started,
        drafts.time,
        verify,
        sum(row.token_count for row in rows),
        drafts.error,
        shortage,
        drafts.was_up_to_date and all(len(row.token_ids) == 1 for row in rows),
        sum(map(_prompt_token_count, rows, verdicts.results)),
        failed,
        drafts.prepared_count,
    )


def _taking_part(
    group: Sequence[Generation], draft_counts: Sequence[int], limits: RoundLimits
) -> tuple[dict[Generation, int], list[int]]:
    """Return the generations for which the chunk of prompts has room, with draft counts, and the share of each."""
    shares = prompt_shares([generation.target_lack for generation in group], limits.prefill_chunk_tokens)
    counts = {one: count for one, count, share in zip(group, draft_counts, shares, strict=True) if share}
    return counts, [share for share in shares if share]


def _take(
    group: Sequence[Generation], rows: Sequence[VerifyRow], verdicts: Verdicts
) -> tuple[list[RowReport], dict[Generation, PacelineError], Shortage | None]:
    """Apply each row's verdict to its generation; return the commits, the failures and the shortage."""
    reports: list[RowReport] = []
    failed: dict[Generation, PacelineError] = {}
    refusals: dict[Generation, Overloaded] = {}
    for generation, row, verdict in zip(group, rows, verdicts.results, strict=True):
        if isinstance(verdict, Verdict):
            reports.append(_commit(generation, row, verdict))
        elif isinstance(verdict, Prefilled):
            generation.target_cached_length = verdict.cached_length
            generation.target_taken_count = verdict.cached_length - row.base_length
        elif isinstance(verdict, Overloaded):
            generation.target_cached_length = row.base_length
            refusals[generation] = verdict
        elif isinstance(verdict, PrefixNotCached) and row.base_length > 0:
            generation.forget_target()  # the next round sends the whole sequence
        else:
            failed[generation] = verdict
    return reports, failed, _shortage(refusals)


def _shortage(refusals: Mapping[Generation, Overloaded]) -> Shortage | None:
    if not refusals:
        return None
    missing_bytes = {
        generation: one.missing_bytes if isinstance(one, CacheFull) else 0 for generation, one in refusals.items()
    }
    return Shortage(missing_bytes, max(one.retry_after_s for one in refusals.values()))


def time_left_s(group: Sequence[Generation], now_s: float) -> float | None:
    """Return the seconds until the last of the group's deadlines, at least 0; None when a generation has none."""
    deadlines_s = [one.request.deadline_s for one in group if one.request.deadline_s is not None]
    return max(0.0, max(deadlines_s) - now_s) if len(deadlines_s) == len(group) else None


async def _propose(
    wishes: Mapping[Generation, int], drafter: Drafter, limits: RoundLimits, deadline: Deadline, clock: Clock
) -> _Drafts:
    """Ask for draft tokens, at most `wishes` by generation, where they can help."""
    wanted = _wanted(wishes, limits, drafter.max_length)
    if not wanted:
        return _Drafts({})
    lacks = [generation.draft_lack for generation, _ in wanted]
    shares = prompt_shares(lacks, drafter.prefill_chunk_tokens)
    asked = {
        generation: generation.propose_row(count, share)
        for (generation, count), share in zip(wanted, shares, strict=True)
        if share
    }
    began = clock()
    try:
        proposals = await drafter.propose(list(asked.values()), deadline)
    except PacelineError as error:
        return _Drafts({}, HopTime(wire_s=clock() - began), error)
    time_spent = _hop_time(clock() - began, proposals.timing)
    drafts = _take_drafts(asked, proposals, limits)
    prepared_count = sum(isinstance(one, Proposal) and one.prepared for one in proposals.results)
    return _Drafts(drafts, time_spent, None, all(lack.count <= NEW_TO_DRAFT for lack in lacks), prepared_count)


def _wanted(
    wishes: Mapping[Generation, int], limits: RoundLimits, draft_max_length: int
) -> list[tuple[Generation, int]]:
    """Return the generations that may have drafts, with the most that each may have."""
    counts = (
        (one, min(_draft_count(one, limits, wish), draft_max_length + 1 - len(one.token_ids)))
        for one, wish in wishes.items()
    )
    return [(generation, count) for generation, count in counts if count > 0]


def _take_drafts(
    asked: Mapping[Generation, ProposeRow], proposals: Proposals, limits: RoundLimits
) -> dict[Generation, tuple[int, ...]]:
    """Return the drafts, and note what the draft service caches now."""
    drafts: dict[Generation, tuple[int, ...]] = {}
    for (generation, row), proposal in zip(asked.items(), proposals.results, strict=True):
        if isinstance(proposal, Proposal):
            known = takewhile(lambda one: 0 <= one < limits.vocabulary_size, proposal.draft_token_ids)
            drafts[generation] = tuple(known)
            generation.draft_cached_length = proposal.cached_length
            generation.draft_taken_count = proposal.cached_length - row.base_length
        elif not isinstance(proposal, _KEEPS_CACHE):
            generation.forget_draft()
            if isinstance(proposal, InvalidRequest):
                # It would be refused for ever, for a token that the draft lacks, say, and brings its prompt each time.
                generation.max_draft_count = 0
    return drafts


def _prompt_token_count(row: VerifyRow, result: VerifyOutcome | PacelineError) -> int:
    """Return the tokens of the row that the target took in before it could decode."""
    if isinstance(result, Prefilled):
        return result.cached_length - row.base_length
    return len(row.token_ids) - 1 if isinstance(result, Verdict) else 0


def _hop_time(elapsed_s: float, timing: CallTiming) -> HopTime:
    return HopTime(max(0.0, elapsed_s - timing.queued_s - timing.executed_s), timing.queued_s, timing.executed_s)


def _draft_count(generation: Generation, limits: RoundLimits, draft_count: int) -> int:
    """Return the number of drafts worth asking for: a round adds one token more than it accepts."""
    if len(generation.token_ids) - generation.target_cached_length > limits.prefill_chunk_tokens:
        return 0
    return min(draft_count, generation.max_draft_count, generation.output.remaining_count - 1)


def _commit(generation: Generation, row: VerifyRow, verdict: Verdict) -> RowReport:
    length, before = len(generation.token_ids), generation.usage
    # Tokens that the draft service cached beyond the accepted ones are not part of the generation.
    generation.draft_cached_length = min(generation.draft_cached_length, length + verdict.accepted_count)
    generation.target_cached_length = verdict.cached_length
    generation.commit(
        [*row.draft_token_ids[: verdict.accepted_count], verdict.next_token_id],
        accepted_count=verdict.accepted_count,
        drafted_count=len(row.draft_token_ids),
        logprobs=verdict.logprobs,
    )
    return RowReport(
        generation.usage.drafted_count - before.drafted_count,
        generation.usage.accepted_count - before.accepted_count,
        len(generation.token_ids) - length,
    )
