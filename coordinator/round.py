"""One round for one group: propose, verify, commit.

Written against two small protocols; the remote clients and the tests' fakes are peers behind them. A draft that fails,
wholly or for a row, costs speed and never output: its rows are verified without drafts.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from coordinator.sequence import Sequence
from paceline.errors import Overloaded, PacelineError, PrefixNotCached
from paceline.types import Prefilled, Proposal, ProposeRow, Verdict, VerifyOutcome, VerifyRow


class Drafter(Protocol):
    async def propose(self, rows: Rows[ProposeRow]) -> list[Proposal | PacelineError]: ...


class Verifier(Protocol):
    async def verify(self, rows: Rows[VerifyRow]) -> list[VerifyOutcome | PacelineError]: ...


@dataclass(frozen=True)
class RoundLimits:
    draft_count: int
    draft_max_length: int
    """Tokens a sequence may have in the draft service."""
    vocabulary_size: int
    """The target's; a draft with a padded vocabulary may propose ids beyond it."""
    prefill_chunk_tokens: int
    """The target's; a sequence of which more is missing there has a prefill round or two before it, without drafts."""


@dataclass(frozen=True)
class RoundReport:
    drafted_count: int
    accepted_count: int
    draft_error: PacelineError | None
    """Why the whole group went without drafts."""
    shortage: Overloaded | None
    """Why some rows found no room in the target's cache; their sequences are as they were."""


async def run_round(group: Rows[Sequence], drafter: Drafter, verifier: Verifier, limits: RoundLimits) -> RoundReport:
    """Run one round and commit its tokens; a row that cannot go on fails its own sequence only.

    Raises what the verify call raises: then no sequence of the group has changed.
    """
    drafts, draft_error = await _propose(group, drafter, limits)
    rows = [sequence.verify_row(drafts.get(sequence, ())) for sequence in group]
    verdicts = await verifier.verify(rows)
    drafted_count = accepted_count = 0
    shortage: Overloaded | None = None
    for sequence, row, verdict in zip(group, rows, verdicts, strict=True):
        if isinstance(verdict, Verdict):
            before = sequence.usage
            _commit(sequence, row, verdict)
            drafted_count += sequence.usage.drafted_count - before.drafted_count
            accepted_count += sequence.usage.accepted_count - before.accepted_count
        elif isinstance(verdict, Prefilled):
            sequence.target_cached_length = verdict.cached_length
        elif isinstance(verdict, Overloaded):
            sequence.target_cached_length = row.base_length
            shortage = verdict
        elif isinstance(verdict, PrefixNotCached) and row.base_length > 0:
            sequence.target_cached_length = 0  # the next round sends the whole sequence
        else:
            sequence.fail(verdict)
    return RoundReport(drafted_count, accepted_count, draft_error, shortage)


async def _propose(
    group: Rows[Sequence], drafter: Drafter, limits: RoundLimits
) -> tuple[dict[Sequence, tuple[int, ...]], PacelineError | None]:
    """Return the draft tokens of the sequences that have any."""
    wanted = [(sequence, count) for sequence in group if (count := _draft_count(sequence, limits)) > 0]
    if not wanted:
        return {}, None
    try:
        proposals = await drafter.propose([sequence.propose_row(count) for sequence, count in wanted])
    except PacelineError as error:
        return {}, error
    drafts: dict[Sequence, tuple[int, ...]] = {}
    for (sequence, _), proposal in zip(wanted, proposals, strict=True):
        if isinstance(proposal, Proposal):
            drafts[sequence] = tuple(takewhile(lambda one: 0 <= one < limits.vocabulary_size, proposal.draft_token_ids))
            sequence.draft_cached_length = proposal.cached_length
        elif not isinstance(proposal, Overloaded):
            sequence.draft_cached_length = 0
    return drafts, None


def _draft_count(sequence: Sequence, limits: RoundLimits) -> int:
    """Drafts worth asking for: a round adds one token more than it accepts, and the draft has a length limit too."""
    if len(sequence.token_ids) - sequence.target_cached_length > limits.prefill_chunk_tokens:
        return 0
    return min(
        limits.draft_count,
        sequence.max_draft_count,
        sequence.output.remaining_count - 1,
        limits.draft_max_length - len(sequence.token_ids) + 1,
    )


def _commit(sequence: Sequence, row: VerifyRow, verdict: Verdict) -> None:
    length = len(sequence.token_ids)
    # What the draft cached beyond the accepted tokens is not part of the sequence.
    sequence.draft_cached_length = min(sequence.draft_cached_length, length + verdict.accepted_count)
    sequence.target_cached_length = verdict.cached_length
    sequence.commit(
        [*row.draft_token_ids[: verdict.accepted_count], verdict.next_token_id],
        accepted_count=verdict.accepted_count,
        drafted_count=len(row.draft_token_ids),
        logprobs=verdict.logprobs,
    )
