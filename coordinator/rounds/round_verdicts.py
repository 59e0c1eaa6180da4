"""What a round's verdicts mean: tokens to commit, caches to note, rows that failed or found no room.

It asks nobody. A verdict may carry those of further rounds, which the target ran by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.rounds.round_drafts import NOTHING_DRAFTED, Draft
from coordinator.rounds.round_report import RowReport, Shortage
from paceline.errors import CacheFull, Overloaded, PacelineError, PeerFailed, PrefixNotCached
from paceline.types import (
    DraftSource,
    HopTime,
    Prefilled,
    RoundSummary,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)

LONGEST_WAIT_S = 10.0
"""Most seconds that rows wait for room before they are tried again, whatever the target says: its lane waits too."""


@dataclass(frozen=True)
class Seen:
    """What is known of a round when its tokens are committed."""

    group_size: int
    started: float
    round_s: float
    propose: HopTime | None
    verify: HopTime
    is_further: bool = False
    """Whether the target ran it by itself: its time is told of with the round before."""

    def told(self, one: Generation, draft: Draft) -> RoundSummary | None:
        """Return what the client is told of the round; its counts are left to the generation."""
        if not one.request.tells_rounds:
            return None
        if self.is_further:
            return RoundSummary(self.group_size, 0, 0, draft.source, None, HopTime(), 0.0, 0.0)
        waited_s = one.queued_s + max(0.0, self.started - one.ready_since_s)
        return RoundSummary(self.group_size, 0, 0, draft.source, self.propose, self.verify, self.round_s, waited_s)


@dataclass
class Taken:
    """What came of the rows of a round."""

    reports: list[RowReport] = field(default_factory=list)
    """Those of the rows that committed tokens."""
    failed: dict[Generation, PacelineError] = field(default_factory=dict)
    refusals: dict[Generation, Overloaded] = field(default_factory=dict)
    prompt_token_count: int = 0
    """Tokens that the target took in before it could decode."""
    heads_count: int = 0
    """Tokens that the target's heads were asked for, after the rows that committed."""
    further: list[list[RowReport]] = field(default_factory=list)
    """Those of the rows of further rounds."""
    pass_count: int = 1

    @property
    def shortage(self) -> Shortage | None:
        if not self.refusals:
            return None
        missing_bytes = {
            generation: one.missing_bytes if isinstance(one, CacheFull) else 0
            for generation, one in self.refusals.items()
        }
        wait_s = max(one.retry_after_s for one in self.refusals.values())
        return Shortage(missing_bytes, min(wait_s, LONGEST_WAIT_S))


def take_verdicts(
    drafts: Mapping[Generation, Draft], rows: Sequence[VerifyRow], verdicts: Verdicts, seen: Seen
) -> Taken:
    """Apply each row's verdict to its generation."""
    taken, further_seen = Taken(), _further_seen(verdicts, seen)
    for (generation, draft), row, result in zip(drafts.items(), rows, verdicts.results, strict=True):
        verdict = _scored(generation, row, result) if row.scores_tokens else result
        if isinstance(verdict, Verdict):
            taken.prompt_token_count += len(row.token_ids) - 1
            taken.heads_count += row.propose_count
            generation.take_in(row.base_length, verdict.reused_count, verdict.cached_length)
            length = row.base_length + len(row.token_ids)
            taken.reports.append(_commit(generation, length, row.propose_count, draft, verdict, seen))
            if verdict.further:
                _take_further(generation, row, verdict, further_seen, taken)
        elif isinstance(verdict, Prefilled):
            generation.take_in(row.base_length, verdict.reused_count, verdict.cached_length)
            generation.target_taken_count = verdict.cached_length - row.base_length
            taken.prompt_token_count += generation.target_taken_count
        elif isinstance(verdict, Overloaded):
            generation.target_cached_length = row.base_length
            if isinstance(verdict, CacheFull) and verdict.gave_cache_up:
                generation.forget_target()
            taken.refusals[generation] = verdict
        elif isinstance(verdict, PrefixNotCached) and row.base_length > 0:
            generation.forget_target()  # the next round sends the whole sequence
        else:
            taken.failed[generation] = verdict
    taken.pass_count += len(further_seen)
    return taken


def _further_seen(verdicts: Verdicts, seen: Seen) -> list[Seen]:
    """Return what is known of each further round: its group are the rows that went on so far."""
    counts = [len(one.further) for one in verdicts.results if isinstance(one, Verdict)]
    sizes = (sum(count > place for count in counts) for place in range(max(counts, default=0)))
    return [replace(seen, group_size=size, is_further=True) for size in sizes]


def _take_further(
    generation: Generation, row: VerifyRow, verdict: Verdict, further_seen: Sequence[Seen], taken: Taken
) -> None:
    """Apply the verdicts of rounds that the target ran by itself after one, up to the end of the output."""
    for place, (before, one) in enumerate(pairwise((verdict, *verdict.further))):
        if generation.ended:
            return
        if place == len(taken.further):
            taken.further.append([])
        taken.heads_count += row.propose_count
        length = len(generation.token_ids)
        generation.take_in(length - 1, 0, one.cached_length)
        draft = Draft(before.draft_token_ids, DraftSource.HEADS) if before.draft_token_ids else NOTHING_DRAFTED
        taken.further[place].append(_commit(generation, length, row.propose_count, draft, one, further_seen[place]))


def _scored(
    generation: Generation, row: VerifyRow, result: VerifyOutcome | PacelineError
) -> VerifyOutcome | PacelineError:
    """Take the log-probabilities of a row's tokens that it asked for. Return the result, or an error without them."""
    if isinstance(result, PacelineError):
        return result
    if row.scored_count(result) and not result.token_logprobs:
        return PeerFailed(
            "the target gives no log-probabilities of a prompt: its service is older than this coordinator; upgrade "
            "it, or leave out echo_prompt or top_logprob_count"
        )
    generation.take_scores(row.base_length, result.token_logprobs)
    return result


def _commit(
    generation: Generation, length: int, propose_count: int, draft: Draft, verdict: Verdict, seen: Seen
) -> RowReport:
    """Commit the tokens of a verdict on drafts after `length` tokens."""
    accepted_count, source = verdict.accepted_count, draft.source
    generation.heads_draft = (
        HeadsDraft(length + accepted_count + 1, verdict.draft_token_ids, propose_count) if propose_count else None
    )
    token_ids = [*draft.token_ids[:accepted_count], verdict.next_token_id]
    # Tokens that the draft service cached beyond the accepted ones are not part of the generation.
    kept = length + accepted_count if source is DraftSource.DRAFT else length
    if generation.draft_cached_length > kept:
        generation.draft_cached_length = kept
    counts = generation.commit(
        token_ids,
        accepted_count=accepted_count,
        drafted_count=len(draft.token_ids),
        logprobs=verdict.logprobs,
        source=source,
        draft_model=draft.model,
        told=seen.told(generation, draft),
    )
    token_ids = token_ids[: counts[2]]
    return RowReport(*counts, source, draft.model, generation, token_ids, generation.heads_draft, generation.ended)
