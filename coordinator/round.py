"""One round for one group: propose, verify, commit.

Written against two small protocols; the remote clients and the tests' fakes are peers behind them. A draft that fails,
wholly or for a row, costs speed and never output: its rows are verified without drafts.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from coordinator.sequence import Sequence
from paceline.errors import Overloaded, PacelineError, PrefixNotCached
from paceline.types import CallTiming, HopTime, Prefilled, Proposal, Proposals, ProposeRow, Verdict, Verdicts, VerifyRow

Clock = Callable[[], float]


class Drafter(Protocol):
    async def propose(self, rows: Rows[ProposeRow]) -> Proposals: ...


class Verifier(Protocol):
    async def verify(self, rows: Rows[VerifyRow]) -> Verdicts: ...


@dataclass(frozen=True)
class RoundLimits:
    draft_max_length: int
    """Tokens a sequence may have in the draft service."""
    vocabulary_size: int
    """The target's; a draft with a padded vocabulary may propose ids beyond it."""
    prefill_chunk_tokens: int
    """The target's; a sequence of which more is missing there has a prefill round or two before it, without drafts."""


@dataclass(frozen=True)
class RowReport:
    drafted_count: int
    accepted_count: int
    committed_count: int


@dataclass(frozen=True)
class RoundReport:
    rows: list[RowReport]
    """Of the rows that committed tokens."""
    duration_s: float
    propose: HopTime
    verify: HopTime
    verified_count: int
    """Tokens the verify call ran, committed and drafted."""
    draft_error: PacelineError | None
    """Why the whole group went without drafts."""
    shortage: Overloaded | None
    """Why some rows found no room in the target's cache; their sequences are as they were."""

    @property
    def drafted_count(self) -> int:
        return sum(row.drafted_count for row in self.rows)


@dataclass(frozen=True)
class _Drafts:
    by_sequence: dict[Sequence, tuple[int, ...]]
    time: HopTime = HopTime()
    error: PacelineError | None = None


async def run_round(
    group: Rows[Sequence],
    drafter: Drafter,
    verifier: Verifier,
    limits: RoundLimits,
    draft_counts: Rows[int],
    clock: Clock = time.perf_counter,
) -> RoundReport:
    """Run one round, with at most so many drafts a row, and commit its tokens.

    A row that cannot go on fails its own sequence only.

    Raises what the verify call raises: then no sequence of the group has changed.
    """
    started = clock()
    drafts = await _propose(group, drafter, limits, draft_counts, clock)
    rows = [sequence.verify_row(drafts.by_sequence.get(sequence, ())) for sequence in group]
    began = clock()
    verdicts = await verifier.verify(rows)
    verify = _hop_time(clock() - began, verdicts.timing)
    reports: list[RowReport] = []
    shortage: Overloaded | None = None
    for sequence, row, verdict in zip(group, rows, verdicts.results, strict=True):
        if isinstance(verdict, Verdict):
            reports.append(_commit(sequence, row, verdict))
        elif isinstance(verdict, Prefilled):
            sequence.target_cached_length = verdict.cached_length
        elif isinstance(verdict, Overloaded):
            sequence.target_cached_length = row.base_length
            shortage = verdict
        elif isinstance(verdict, PrefixNotCached) and row.base_length > 0:
            sequence.target_cached_length = 0  # the next round sends the whole sequence
        else:
            sequence.fail(verdict)
    verified_count = sum(len(row.token_ids) + len(row.draft_token_ids) for row in rows)
    return RoundReport(reports, clock() - started, drafts.time, verify, verified_count, drafts.error, shortage)


async def _propose(
    group: Rows[Sequence], drafter: Drafter, limits: RoundLimits, draft_counts: Rows[int], clock: Clock
) -> _Drafts:
    """Ask for the draft tokens of the sequences that can use any."""
    wanted = [
        (sequence, count)
        for sequence, draft_count in zip(group, draft_counts, strict=True)
        if (count := _draft_count(sequence, limits, draft_count)) > 0
    ]
    if not wanted:
        return _Drafts({})
    began = clock()
    try:
        proposals = await drafter.propose([sequence.propose_row(count) for sequence, count in wanted])
    except PacelineError as error:
        return _Drafts({}, HopTime(wire_s=clock() - began), error)
    time_spent = _hop_time(clock() - began, proposals.timing)
    drafts: dict[Sequence, tuple[int, ...]] = {}
    for (sequence, _), proposal in zip(wanted, proposals.results, strict=True):
        if isinstance(proposal, Proposal):
            drafts[sequence] = tuple(takewhile(lambda one: 0 <= one < limits.vocabulary_size, proposal.draft_token_ids))
            sequence.draft_cached_length = proposal.cached_length
        elif not isinstance(proposal, Overloaded):
            sequence.draft_cached_length = 0
    return _Drafts(drafts, time_spent)


def _hop_time(elapsed_s: float, timing: CallTiming) -> HopTime:
    return HopTime(max(0.0, elapsed_s - timing.queued_s - timing.executed_s), timing.queued_s, timing.executed_s)


def _draft_count(sequence: Sequence, limits: RoundLimits, draft_count: int) -> int:
    """Drafts worth asking for: a round adds one token more than it accepts, and the draft has a length limit too."""
    if len(sequence.token_ids) - sequence.target_cached_length > limits.prefill_chunk_tokens:
        return 0
    return min(
        draft_count,
        sequence.max_draft_count,
        sequence.output.remaining_count - 1,
        limits.draft_max_length - len(sequence.token_ids) + 1,
    )


def _commit(sequence: Sequence, row: VerifyRow, verdict: Verdict) -> RowReport:
    length, before = len(sequence.token_ids), sequence.usage
    # What the draft cached beyond the accepted tokens is not part of the sequence.
    sequence.draft_cached_length = min(sequence.draft_cached_length, length + verdict.accepted_count)
    sequence.target_cached_length = verdict.cached_length
    sequence.commit(
        [*row.draft_token_ids[: verdict.accepted_count], verdict.next_token_id],
        accepted_count=verdict.accepted_count,
        drafted_count=len(row.draft_token_ids),
        logprobs=verdict.logprobs,
    )
    return RowReport(
        sequence.usage.drafted_count - before.drafted_count,
        sequence.usage.accepted_count - before.accepted_count,
        len(sequence.token_ids) - length,
    )
