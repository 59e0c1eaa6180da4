"""One round for one group: propose, verify, commit.

Written against protocols, which the remote clients and the tests' fakes implement. A failed draft call or draft row
costs speed and never output: the rows are verified without drafts. No call outlasts the deadlines of the group's
requests.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from coordinator.protocols import Deadline, Drafter, Verifies
from coordinator.replicas.plausibility import scored_count
from coordinator.requests.generation import Generation, HeadsDraft
from coordinator.rounds.further_rounds import NONE_FURTHER, FurtherCounts
from coordinator.rounds.prompt_shares import prompt_shares
from coordinator.rounds.round_report import NEW_TO_DRAFT, DraftCall, RoundReport, RowReport, Shortage
from coordinator.rounds.wishes import Wish
from paceline.checks import DECODED_TOKENS
from paceline.errors import (
    CacheFull,
    CallTimedOut,
    InvalidRequest,
    Overloaded,
    PacelineError,
    PeerFailed,
    PeerUnavailable,
    PrefixNotCached,
)
from paceline.tasks import results_of, side_by_side
from paceline.types import (
    CallTiming,
    DraftSource,
    HopTime,
    Prefilled,
    Proposal,
    Proposals,
    ProposeRow,
    RoundSummary,
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
    max_rows: int = 0
    """Most rows of a call to the target; 0 if unknown."""


_KEEPS_CACHE = (Overloaded, PeerUnavailable, CallTimedOut)
"""Errors of a propose row that say nothing about its cache."""


@dataclass(slots=True)
class _Draft:
    """Draft tokens of a row."""

    token_ids: tuple[int, ...] = ()
    source: DraftSource | None = None
    model: str = ""

    @property
    def leaves_models_idle(self) -> bool:
        return self.source is not None and self.source is not DraftSource.DRAFT


NO_DRAFT = _Draft()


@dataclass(frozen=True)
class _Asked:
    """Rows for the draft services of one model, and what came of them."""

    rows: dict[Generation, ProposeRow]
    call: DraftCall
    result: Proposals | PacelineError
    time: HopTime

    @property
    def others_s(self) -> float:
        return self.result.timing.others_s if isinstance(self.result, Proposals) else 0.0

    @property
    def prepared_count(self) -> int:
        results = self.result.results if isinstance(self.result, Proposals) else ()
        return sum(isinstance(one, Proposal) and one.prepared for one in results)


@dataclass(frozen=True)
class _Seen:
    """What is known of a round when its tokens are committed."""

    group_size: int
    started: float
    round_s: float
    propose: HopTime | None
    verify: HopTime
    is_further: bool = False
    """Whether the target ran it by itself: its time is told of with the round before."""

    def told(self, one: Generation, draft: _Draft) -> RoundSummary | None:
        """Return what the client is told of the round; its counts are left to the generation."""
        if not one.request.tells_rounds:
            return None
        if self.is_further:
            return RoundSummary(self.group_size, 0, 0, draft.source, None, HopTime(), 0.0, 0.0)
        waited_s = one.queued_s + max(0.0, self.started - one.ready_since_s)
        return RoundSummary(self.group_size, 0, 0, draft.source, self.propose, self.verify, self.round_s, waited_s)


async def run_round(
    wishes: Mapping[Generation, Wish],
    drafters: Mapping[str, Drafter],
    verifier: Verifies,
    limits: RoundLimits,
    *,
    draft_worth_s: float | None = None,
    is_alone: bool = False,
    further: FurtherCounts = NONE_FURTHER,
    clock: Clock = time.perf_counter,
) -> RoundReport:
    """Run one round for a group, with the drafts that `wishes` name for each generation, and commit its tokens.

    `drafters` are those that can be asked now, by their model. A row that fails is reported and does not stop the
    others. A prompt for which others leave no room waits (`prompt_shares`). `draft_worth_s` is the time after which
    drafting costs more than it saves. `is_alone` says that no other round of this coordinator may ask them meanwhile.
    The target may run `further` rounds by itself in the same call: with what its heads draft, or plain ones where no
    row has drafts. None runs where a row brings a prompt, for others wait for its first token.

    Raise the verify call's error; then no tokens were committed.
    """
    started = clock()
    wishes, shares, taken_in = _taking_part(wishes, limits)
    group = list(wishes)
    deadline = Deadline(time_left_s(group, started), draft_worth_s)
    asked = await _propose(wishes, taken_in, drafters, deadline, clock)
    drafts = _drafts(wishes, taken_in, asked, limits.vocabulary_size)
    prompts = _coming_prompts(wishes, taken_in, drafters)
    if max(shares) > DECODED_TOKENS:
        further = NONE_FURTHER
    elif any(one.token_ids for one in drafts.values()):
        further = replace(further, plain=0)
    rows = [
        _verify_row(
            one, draft, share, wish, further, draft_is_idle=not prompts and (draft.leaves_models_idle or is_alone)
        )
        for (one, draft), wish, share in zip(drafts.items(), wishes.values(), shares, strict=True)
    ]
    async with _taking_in(prompts, drafters, deadline):
        began = clock()
        verdicts = await verifier.verify(rows, time_left_s(group, began))
        verify = _hop_time(clock() - began, verdicts.timing)
    propose = max((one.time for one in asked.values()), key=lambda hop: hop.total_s, default=None)
    taken = _take(drafts, rows, verdicts, _Seen(len(rows), started, clock() - started, propose, verify))
    calls = {model: one.call for model, one in asked.items()}
    return RoundReport(
        taken.reports,
        clock() - started,
        propose or HopTime(),
        verify,
        _error_of_all(asked),
        _shortage(taken.refusals),
        max(shares) == 1 and not any(one.caught_up_count for one in calls.values()),
        taken.prompt_token_count,
        taken.failed,
        calls,
        sum(one.prepared_count for one in asked.values()),
        taken.heads_count,
        verdicts.timing.others_s + max((one.others_s for one in asked.values()), default=0.0),
        verdicts.timing.worked_s,
        taken.further,
        taken.pass_count,
    )


def _verify_row(
    one: Generation, draft: _Draft, token_count: int, wish: Wish, further: FurtherCounts, *, draft_is_idle: bool
) -> VerifyRow:
    heads_count = one.useful_heads_count(wish.propose_count)
    further_count = further.with_heads if heads_count else further.plain
    if len(draft.token_ids) > wish.propose_count:
        further_count = 0  # what follows a long copy is a copy, which heads would end
    return one.verify_row(draft.token_ids, token_count, heads_count, further_count, draft_is_idle=draft_is_idle)


def _taking_part(
    wishes: Mapping[Generation, Wish], limits: RoundLimits
) -> tuple[Mapping[Generation, Wish], list[int], Set[Generation]]:
    """Return the generations for which the chunk of prompts has room, with their wishes, and the share of each.

    The third are those of which the round only takes in a part of what the target lacks.
    """
    group, chunk_tokens = list(wishes), limits.prefill_chunk_tokens
    lacks = [one.target_lack for one in group]
    shares = prompt_shares(lacks, lambda index: group[index].target_taken, chunk_tokens)
    if not all(shares):
        wishes = {one: wish for (one, wish), share in zip(wishes.items(), shares, strict=True) if share}
    taken_in = {one for one, lack, share in zip(group, lacks, shares, strict=True) if share and lack > chunk_tokens}
    return wishes, [share for share in shares if share], taken_in


@dataclass
class _Taken:
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


def _take(drafts: Mapping[Generation, _Draft], rows: Sequence[VerifyRow], verdicts: Verdicts, seen: _Seen) -> _Taken:
    """Apply each row's verdict to its generation."""
    taken = _Taken()
    for (generation, draft), row, result in zip(drafts.items(), rows, verdicts.results, strict=True):
        verdict = _scored(generation, row, result) if row.scores_tokens else result
        if isinstance(verdict, Verdict):
            taken.prompt_token_count += len(row.token_ids) - 1
            taken.heads_count += row.propose_count
            generation.take_in(row.base_length, verdict.reused_count, verdict.cached_length)
            length = row.base_length + len(row.token_ids)
            taken.reports.append(_commit(generation, length, row.propose_count, draft, verdict, seen))
            if verdict.further:
                taken.pass_count = max(taken.pass_count, 1 + len(verdict.further))
                _take_further(generation, row, verdict, seen, taken)
        elif isinstance(verdict, Prefilled):
            generation.take_in(row.base_length, verdict.reused_count, verdict.cached_length)
            generation.target_taken_count = verdict.cached_length - row.base_length
            taken.prompt_token_count += generation.target_taken_count
        elif isinstance(verdict, Overloaded):
            generation.target_cached_length = row.base_length
            if _gave_cache_up(verdict):
                generation.forget_target()
            taken.refusals[generation] = verdict
        elif isinstance(verdict, PrefixNotCached) and row.base_length > 0:
            generation.forget_target()  # the next round sends the whole sequence
        else:
            taken.failed[generation] = verdict
    return taken


def _take_further(generation: Generation, row: VerifyRow, verdict: Verdict, seen: _Seen, taken: _Taken) -> None:
    """Apply the verdicts of rounds that the target ran by itself after one, up to the end of the output."""
    seen = replace(seen, is_further=True)
    for place, (before, one) in enumerate(pairwise((verdict, *verdict.further))):
        if generation.ended:
            return
        if place == len(taken.further):
            taken.further.append([])
        taken.heads_count += row.propose_count
        length = len(generation.token_ids)
        generation.take_in(length - 1, 0, one.cached_length)
        draft = _Draft(before.draft_token_ids, DraftSource.HEADS) if before.draft_token_ids else NO_DRAFT
        taken.further[place].append(_commit(generation, length, row.propose_count, draft, one, seen))


def _scored(
    generation: Generation, row: VerifyRow, result: VerifyOutcome | PacelineError
) -> VerifyOutcome | PacelineError:
    """Take the log-probabilities of a row's tokens that it asked for. Return the result, or an error without them."""
    if isinstance(result, PacelineError):
        return result
    if scored_count(row, result) and not result.token_logprobs:
        return PeerFailed(
            "the target gives no log-probabilities of a prompt: its service is older than this coordinator; upgrade "
            "it, or leave out echo_prompt or top_logprob_count"
        )
    generation.take_scores(row.base_length, result.token_logprobs)
    return result


def _shortage(refusals: Mapping[Generation, Overloaded]) -> Shortage | None:
    if not refusals:
        return None
    missing_bytes = {
        generation: one.missing_bytes if isinstance(one, CacheFull) else 0 for generation, one in refusals.items()
    }
    return Shortage(missing_bytes, max(one.retry_after_s for one in refusals.values()))


def time_left_s(group: Sequence[Generation], now_s: float) -> float | None:
    """Return the seconds until the last of the group's deadlines, at least 0; None when a generation has none."""
    ends_s = deadlines_s(group)
    return max(0.0, max(ends_s) - now_s) if len(ends_s) == len(group) else None


def deadlines_s(group: Sequence[Generation]) -> list[float]:
    """Return the deadlines of those generations of the group that have one."""
    return [one.request.deadline_s for one in group if one.request.deadline_s is not None]


async def _propose(
    wishes: Mapping[Generation, Wish],
    taken_in: Set[Generation],
    drafters: Mapping[str, Drafter],
    deadline: Deadline,
    clock: Clock,
) -> dict[str, _Asked]:
    """Ask the draft services of every model at once; return what came of it, by model."""
    wished = {one.draft_model for one in wishes.values() if one.asked_count}
    models = [model for model in drafters if model in wished]
    calls = [_ask(model, wishes, taken_in, drafters[model], deadline, clock) for model in models]
    return {model: answer for model, answer in zip(models, await results_of(calls), strict=True) if answer}


async def _ask(
    model: str,
    wishes: Mapping[Generation, Wish],
    taken_in: Set[Generation],
    drafter: Drafter,
    deadline: Deadline,
    clock: Clock,
) -> _Asked | None:
    """Ask for draft tokens where they can help; return None where they cannot for any row."""
    wanted: list[tuple[Generation, int]] = []
    longest = drafter.max_length + 1
    for one in _asking(model, wishes):
        if one in taken_in:
            continue
        count = min(wishes[one].asked_count, one.most_useful_drafts, longest - len(one.token_ids))
        if count > 0:
            one.move_draft(model)
            wanted.append((one, count))
    if not wanted:
        return None
    shares = prompt_shares(
        [one.draft_lack for one, _ in wanted],
        lambda index: wanted[index][0].draft_taken_count,
        drafter.prefill_chunk_tokens,
    )
    rows = {one: one.propose_row(count, share) for (one, count), share in zip(wanted, shares, strict=True) if share}
    call = _call_of(rows)
    began = clock()
    try:
        proposals = await drafter.propose(list(rows.values()), deadline)
    except PacelineError as error:
        return _Asked(rows, call, error, HopTime(wire_s=clock() - began))
    return _Asked(rows, call, proposals, _hop_time(clock() - began, proposals.timing))


def _asking(model: str, wishes: Mapping[Generation, Wish]) -> list[Generation]:
    """Return the generations that are to ask draft services of the model, and were not refused there."""
    return [
        one
        for one, wish in wishes.items()
        if wish.asked_count and wish.draft_model == model and model not in one.refused_draft_models
    ]


def _coming_prompts(
    wishes: Mapping[Generation, Wish], taken_in: Set[Generation], drafters: Mapping[str, Drafter]
) -> dict[str, dict[Generation, ProposeRow]]:
    """Return rows for draft services of each model, with the prompts of which the target takes in a part now."""
    coming = {one: wish for one, wish in wishes.items() if one in taken_in and one.most_useful_drafts > 0}
    if not coming:
        return {}
    rows = {model: _prompt_rows(model, coming, drafter) for model, drafter in drafters.items()}
    return {model: own for model, own in rows.items() if own}


@asynccontextmanager
async def _taking_in(
    prompts: Mapping[str, Mapping[Generation, ProposeRow]], drafters: Mapping[str, Drafter], deadline: Deadline
) -> AsyncIterator[None]:
    """Meanwhile have draft services take prompts in, so that drafts can follow at once."""
    if not prompts:
        yield
        return
    async with side_by_side() as tasks:
        for model, rows in prompts.items():
            tasks.create_task(_take_in(rows, drafters[model], deadline))
        yield


def _prompt_rows(model: str, coming: Mapping[Generation, Wish], drafter: Drafter) -> dict[Generation, ProposeRow]:
    """Return rows without drafts for generations that will ask the model once the target has their prompts."""
    able = [one for one in _asking(model, coming) if len(one.token_ids) <= drafter.max_length]
    for one in able:
        one.move_draft(model)
    able = [one for one in able if one.draft_lack > DECODED_TOKENS]
    # The last token comes with the row that asks for drafts.
    lacks = [one.draft_lack - 1 for one in able]
    shares = prompt_shares(lacks, lambda index: able[index].draft_taken_count, drafter.prefill_chunk_tokens)
    return {one: one.propose_row(1, share) for one, share in zip(able, shares, strict=True) if share}


async def _take_in(rows: Mapping[Generation, ProposeRow], drafter: Drafter, deadline: Deadline) -> None:
    with suppress(PacelineError):  # a call that fails costs speed: the prompt follows with the rows that ask for drafts
        proposals = await drafter.propose(list(rows.values()), deadline)
        for (one, row), proposal in zip(rows.items(), proposals.results, strict=True):
            _proposed(one, row, proposal)


def _call_of(rows: Mapping[Generation, ProposeRow]) -> DraftCall:
    counts = [row.draft_count for row in rows.values()]
    caught_up = sum(max(0, len(row.token_ids) - NEW_TO_DRAFT) for row in rows.values())
    return DraftCall(len(rows), max(counts), sum(counts), caught_up)


def _error_of_all(asked: Mapping[str, _Asked]) -> PacelineError | None:
    """Return the error of a call when no call succeeded."""
    errors = [one.result for one in asked.values() if isinstance(one.result, PacelineError)]
    return errors[0] if errors and len(errors) == len(asked) else None


def _drafts(
    wishes: Mapping[Generation, Wish], taken_in: Set[Generation], asked: Mapping[str, _Asked], vocabulary_size: int
) -> dict[Generation, _Draft]:
    """Return each row's draft: what the draft service gave, or else the tokens at hand."""
    drafts: dict[Generation, _Draft] = {}
    for one, wish in wishes.items():
        if wish.token_ids and one not in taken_in:
            token_ids = wish.token_ids[: max(0, one.most_useful_drafts)]
            drafts[one] = _draft(token_ids, wish.source, "", vocabulary_size)
        else:
            drafts[one] = NO_DRAFT
    for model, answer in asked.items():
        if isinstance(answer.result, Proposals):
            for (one, row), proposal in zip(answer.rows.items(), answer.result.results, strict=True):
                drafted = _draft(_proposed(one, row, proposal), DraftSource.DRAFT, model, vocabulary_size)
                drafts[one] = drafted if drafted.token_ids else drafts[one]
    return drafts


def _draft(token_ids: tuple[int, ...], source: DraftSource | None, model: str, vocabulary_size: int) -> _Draft:
    """Return the tokens as a draft, up to the first that the target does not know."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        token_ids = tuple(takewhile(lambda one: 0 <= one < vocabulary_size, token_ids))
    return _Draft(token_ids, source, model) if token_ids else NO_DRAFT


def _proposed(generation: Generation, row: ProposeRow, proposal: Proposal | PacelineError) -> tuple[int, ...]:
    """Return the tokens that a draft service proposes, and note what it caches now."""
    if isinstance(proposal, Proposal):
        generation.draft_cached_length = proposal.cached_length
        generation.draft_taken_count = proposal.cached_length - row.base_length
        return proposal.draft_token_ids
    if not isinstance(proposal, _KEEPS_CACHE) or _gave_cache_up(proposal):
        generation.forget_draft()
        if isinstance(proposal, InvalidRequest):
            # It would be refused for ever, for a token that the draft lacks, say, and brings its prompt each time.
            generation.refused_draft_models.add(generation.draft_model)
    return ()


def _gave_cache_up(error: PacelineError) -> bool:
    return isinstance(error, CacheFull) and error.gave_cache_up


def _hop_time(elapsed_s: float, timing: CallTiming) -> HopTime:
    return HopTime(max(0.0, elapsed_s - timing.queued_s - timing.executed_s), timing.queued_s, timing.executed_s)


def _commit(
    generation: Generation, length: int, propose_count: int, draft: _Draft, verdict: Verdict, seen: _Seen
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
        told=seen.told(generation, draft) if generation.request.tells_rounds else None,
    )
    token_ids = token_ids[: counts[2]]
    return RowReport(*counts, source, draft.model, generation, token_ids, generation.heads_draft, generation.ended)
