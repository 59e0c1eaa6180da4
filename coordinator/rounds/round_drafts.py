"""The drafts of a round: what its rows have at hand, and what draft services are asked for.

A failed call or row costs speed and never output. It knows nothing of the target.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from coordinator.protocols import Deadline, Drafter
from coordinator.requests.generation import Generation
from coordinator.rounds.prompt_shares import prompt_shares
from coordinator.rounds.round_report import NEW_TO_DRAFT, DraftCall
from coordinator.rounds.wishes import Wish
from paceline.checks import DECODED_TOKENS
from paceline.errors import CacheFull, CallTimedOut, InvalidRequest, Overloaded, PacelineError, PeerUnavailable
from paceline.tasks import results_of, side_by_side
from paceline.types import DraftSource, HopTime, Proposal, Proposals, ProposeRow

_KEEPS_CACHE = (Overloaded, PeerUnavailable, CallTimedOut)
"""Errors of a propose row that say nothing about its cache."""


@dataclass(slots=True)
class Draft:
    """Draft tokens of a row."""

    token_ids: tuple[int, ...] = ()
    source: DraftSource | None = None
    model: str = ""

    @property
    def leaves_models_idle(self) -> bool:
        return self.source is not None and self.source is not DraftSource.DRAFT


NOTHING_DRAFTED = Draft()


@dataclass(frozen=True)
class Asked:
    """Rows for the draft services of one model, and what came of them."""

    rows: dict[Generation, ProposeRow]
    call: DraftCall
    result: Proposals | PacelineError
    time: HopTime

    @property
    def others_s(self) -> float:
        return self.result.timing.others_s if isinstance(self.result, Proposals) else 0.0

    @property
    def lacks_room(self) -> bool:
        """Whether a draft service had no room in its cache for a row."""
        return isinstance(self.result, Proposals) and any(isinstance(one, CacheFull) for one in self.result.results)


async def ask_drafts(
    wishes: Mapping[Generation, Wish],
    taken_in: Set[Generation],
    drafters: Mapping[str, Drafter],
    deadline: Deadline,
    clock: Callable[[], float],
) -> dict[str, Asked]:
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
    clock: Callable[[], float],
) -> Asked | None:
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
        return Asked(rows, call, error, HopTime(wire_s=clock() - began))
    took_s = clock() - began
    if any(isinstance(one, Proposal) and one.prepared for one in proposals.results):
        call = replace(call, prepared_wait_s=took_s)
    return Asked(rows, call, proposals, HopTime.of(took_s, proposals.timing))


def _asking(model: str, wishes: Mapping[Generation, Wish]) -> list[Generation]:
    """Return the generations that are to ask draft services of the model, and may."""
    return [
        one for one, wish in wishes.items() if wish.asked_count and wish.draft_model == model and one.may_ask(model)
    ]


def _call_of(rows: Mapping[Generation, ProposeRow]) -> DraftCall:
    counts = [row.draft_count for row in rows.values()]
    caught_up = sum(max(0, len(row.token_ids) - NEW_TO_DRAFT) for row in rows.values())
    return DraftCall(len(rows), max(counts), sum(counts), caught_up)


def error_of_all(asked: Mapping[str, Asked]) -> PacelineError | None:
    """Return the error of a call when no call succeeded."""
    errors = [one.result for one in asked.values() if isinstance(one.result, PacelineError)]
    return errors[0] if errors and len(errors) == len(asked) else None


def drafts_of(
    wishes: Mapping[Generation, Wish], taken_in: Set[Generation], asked: Mapping[str, Asked], vocabulary_size: int
) -> dict[Generation, Draft]:
    """Return each row's draft: what the draft service gave, or else the tokens at hand."""
    drafts: dict[Generation, Draft] = {}
    for one, wish in wishes.items():
        if wish.token_ids and one not in taken_in:
            token_ids = wish.token_ids[: max(0, one.most_useful_drafts)]
            drafts[one] = _draft(token_ids, wish.source, "", vocabulary_size)
        else:
            drafts[one] = NOTHING_DRAFTED
    for model, answer in asked.items():
        if isinstance(answer.result, Proposals):
            for (one, row), proposal in zip(answer.rows.items(), answer.result.results, strict=True):
                drafted = _draft(_proposed(one, row, proposal), DraftSource.DRAFT, model, vocabulary_size)
                drafts[one] = drafted if drafted.token_ids else drafts[one]
    return drafts


def _draft(token_ids: tuple[int, ...], source: DraftSource | None, model: str, vocabulary_size: int) -> Draft:
    """Return the tokens as a draft, up to the first that the target does not know."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        token_ids = tuple(takewhile(lambda one: 0 <= one < vocabulary_size, token_ids))
    return Draft(token_ids, source, model) if token_ids else NOTHING_DRAFTED


def _proposed(generation: Generation, row: ProposeRow, proposal: Proposal | PacelineError) -> tuple[int, ...]:
    """Return the tokens that a draft service proposes, and note what it caches now."""
    if isinstance(proposal, Proposal):
        generation.draft_cached_length = proposal.cached_length
        generation.draft_taken_count = proposal.cached_length - row.base_length
        if proposal.draft_token_ids:  # a part of its prompt says nothing of the room for the rest
            generation.draft_pauses.pop(generation.draft_model, None)
        return proposal.draft_token_ids
    if isinstance(proposal, CacheFull) and len(row.token_ids) + row.following_count > DECODED_TOKENS:
        generation.pause_draft()
    if not isinstance(proposal, _KEEPS_CACHE) or (isinstance(proposal, CacheFull) and proposal.gave_cache_up):
        generation.forget_draft()
        if isinstance(proposal, InvalidRequest):
            # It would be refused for ever, for a token that the draft lacks, say, and brings its prompt each time.
            generation.refused_draft_models.add(generation.draft_model)
    return ()


def coming_prompts(
    wishes: Mapping[Generation, Wish], taken_in: Set[Generation], drafters: Mapping[str, Drafter]
) -> dict[str, dict[Generation, ProposeRow]]:
    """Return rows for draft services of each model, with the prompts of which the target takes in a part now."""
    coming = {one: wish for one, wish in wishes.items() if one in taken_in and one.most_useful_drafts > 0}
    if not coming:
        return {}
    rows = {model: _prompt_rows(model, coming, drafter) for model, drafter in drafters.items()}
    return {model: own for model, own in rows.items() if own}


@asynccontextmanager
async def taking_in(
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
