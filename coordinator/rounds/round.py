"""One round for one group: propose, verify, commit.

Written against protocols, which the remote clients and the tests' fakes implement. `round_drafts` asks for drafts,
`round_verdicts` commits what the target answers. No call outlasts the deadlines of the group's requests.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from coordinator.protocols import Deadline, Drafter, Verifies
from coordinator.requests.generation import Generation
from coordinator.rounds.further_rounds import LEAST_SHARE, NONE_FURTHER, FurtherCounts
from coordinator.rounds.prompt_shares import prompt_shares
from coordinator.rounds.round_drafts import (
    Asked,
    Draft,
    ask_drafts,
    coming_prompts,
    drafts_of,
    error_of_all,
    taking_in,
)
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.round_verdicts import Seen, Taken, take_verdicts
from coordinator.rounds.wishes import Wish
from paceline.checks import DECODED_TOKENS
from paceline.errors import PacelineError
from paceline.types import CallTiming, HopTime, VerifyRow


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
    heads_count: int = 0
    """Most tokens that the target's heads draft for a row."""

    def allows_further(self, draft: Draft) -> bool:
        """Return whether further rounds may follow a draft: what follows a long copy is a copy, which heads end."""
        return len(draft.token_ids) <= self.heads_count


async def run_round(
    wishes: Mapping[Generation, Wish],
    drafters: Mapping[str, Drafter],
    verifier: Verifies,
    limits: RoundLimits,
    *,
    draft_worth_s: float | None = None,
    is_alone: bool = False,
    further: FurtherCounts = NONE_FURTHER,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundReport:
    """Run one round for a group, with the drafts that `wishes` name for each generation, and commit its tokens.

    `drafters` are those that can be asked now, by their model. A row that fails is reported and does not stop the
    others. A prompt for which others leave no room waits (`prompt_shares`). `draft_worth_s` is the time after which
    drafting costs more than it saves. `is_alone` says that no other round of this coordinator may ask them meanwhile.
    The target may run `further` rounds by itself in the same call: with what its heads draft, or plain ones where no
    row has drafts. None runs where a row brings a prompt, for others wait for its first token.

    Raise the verify call's error; then no tokens were committed.
    """
    started, group = clock(), list(wishes)
    wishes, shares, taken_in = _taking_part(wishes, limits)
    # A call may last as long as any of the group has time, those that wait too: the scheduler asks whether it had.
    deadline = Deadline(time_left_s(group, started), draft_worth_s)
    asked = await ask_drafts(wishes, taken_in, drafters, deadline, clock)
    drafts = drafts_of(wishes, taken_in, asked, limits.vocabulary_size)
    prompts = coming_prompts(wishes, taken_in, drafters)
    further = _further_here(further, shares, drafts)
    rows = [
        _verify_row(
            one,
            draft,
            share,
            wish,
            further if limits.allows_further(draft) else NONE_FURTHER,
            draft_is_idle=not prompts and (draft.leaves_models_idle or is_alone),
        )
        for (one, draft), wish, share in zip(drafts.items(), wishes.values(), shares, strict=True)
    ]
    rows = _without_few_further(rows)
    async with taking_in(prompts, drafters, deadline):
        began = clock()
        verdicts = await verifier.verify(rows, time_left_s(group, began))
        verify = HopTime.of(clock() - began, verdicts.timing)
    propose = max((one.time for one in asked.values()), key=lambda hop: hop.total_s, default=None)
    seen = Seen(len(rows), started, clock() - started, propose, verify)
    taken = take_verdicts(drafts, rows, verdicts, seen)
    return _report(seen, taken, asked, verdicts.timing, max(shares), clock() - started)


def _further_here(further: FurtherCounts, shares: Sequence[int], drafts: Mapping[Generation, Draft]) -> FurtherCounts:
    """Return as many further rounds as the rows allow."""
    if max(shares) > DECODED_TOKENS:
        return NONE_FURTHER
    return replace(further, plain=0) if any(one.token_ids for one in drafts.values()) else further


def _without_few_further(rows: list[VerifyRow]) -> list[VerifyRow]:
    """Return the rows, without further rounds where few have any: the others would wait."""
    count = sum(row.further_count > 0 for row in rows)
    are_few = 0 < count < LEAST_SHARE * len(rows)
    return [replace(row, further_count=0) for row in rows] if are_few else rows


def _report(
    seen: Seen, taken: Taken, asked: Mapping[str, Asked], timing: CallTiming, largest_share: int, duration_s: float
) -> RoundReport:
    calls = {model: one.call for model, one in asked.items()}
    return RoundReport(
        rows=taken.reports,
        duration_s=duration_s,
        propose=seen.propose or HopTime(),
        verify=seen.verify,
        draft_error=error_of_all(asked),
        shortage=taken.shortage,
        is_decoding=largest_share == 1 and not any(one.caught_up_count for one in calls.values()),
        prompt_token_count=taken.prompt_token_count,
        failed=taken.failed,
        draft_calls=calls,
        heads_count=taken.heads_count,
        others_s=timing.others_s + max((one.others_s for one in asked.values()), default=0.0),
        target_worked_s=timing.worked_s,
        further=taken.further,
        pass_count=taken.pass_count,
        draft_times={model: one.time for model, one in asked.items() if not isinstance(one.result, PacelineError)},
        drafts_lack_room=any(one.lacks_room for one in asked.values()),
    )


def _verify_row(
    one: Generation, draft: Draft, token_count: int, wish: Wish, further: FurtherCounts, *, draft_is_idle: bool
) -> VerifyRow:
    heads_count = one.useful_heads_count(wish.propose_count)
    further_count = further.with_heads if heads_count else further.plain
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
    taken_in = {
        one
        for one, lack, share in zip(group, lacks, shares, strict=True)
        if share and (lack > chunk_tokens or share < lack)
    }
    return wishes, [share for share in shares if share], taken_in


def time_left_s(group: Sequence[Generation], now_s: float) -> float | None:
    """Return the seconds until the last of the group's deadlines, at least 0; None when a generation has none."""
    ends_s = deadlines_s(group)
    return max(0.0, max(ends_s) - now_s) if len(ends_s) == len(group) else None


def deadlines_s(group: Sequence[Generation]) -> list[float]:
    """Return the deadlines of those generations of the group that have one."""
    return [one.request.deadline_s for one in group if one.request.deadline_s is not None]
