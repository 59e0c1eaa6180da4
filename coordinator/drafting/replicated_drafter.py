"""All draft replicas as one drafter: the rows of a generation always go to the same replica, which has its cache.

Owns which generation is where. A part of a call that fails costs only the drafts of its own rows. Without a replica, no
drafts are asked for.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from coordinator.drafting.guarded_draft import GuardedDraft, timing_of_all
from coordinator.protocols import Deadline, RemoteDraft
from coordinator.replicas.replica import Replica, models_up
from coordinator.replicas.stickiness import Beginnings, Stickiness, beginnings_of
from paceline.errors import PacelineError, PeerUnavailable, PrefixNotCached
from paceline.tasks import results_of
from paceline.types import (
    ModelDescription,
    PreparedDrafts,
    Proposal,
    Proposals,
    ProposeRow,
    ReplicaDescription,
    ReplicaState,
)


class ReplicatedDrafter:
    def __init__(self, guard: Callable[[Replica[RemoteDraft]], GuardedDraft]) -> None:
        """`guard` puts a replica behind a circuit of its own."""
        self._guard = guard
        self._drafts: dict[str, GuardedDraft] = {}
        self._stickiness = Stickiness()
        self._homes: dict[str, GuardedDraft] = {}
        """Replicas by sequence id."""
        self._take_prepared: Callable[[Sequence[PreparedDrafts]], None] = lambda prepared: None

    def listen(self, take: Callable[[Sequence[PreparedDrafts]], None]) -> None:
        """Give what replicas tell unasked to `take`. To be called before there are replicas."""
        self._take_prepared = take

    @property
    def is_usable(self) -> bool:
        return any(draft.is_usable for draft in self._drafts.values())

    @property
    def is_healthy(self) -> bool:
        return any(draft.is_healthy for draft in self._drafts.values())

    @property
    def max_length(self) -> int:
        """Most tokens of a generation that every usable replica takes; 0 when none is usable."""
        return min((draft.max_length for draft in self._drafts.values() if draft.is_usable), default=0)

    @property
    def prefill_chunk_tokens(self) -> int:
        """Prompt tokens that every usable replica computes in one call; 0 when none is usable."""
        return min((draft.prefill_chunk_tokens for draft in self._drafts.values() if draft.is_usable), default=0)

    @property
    def max_rows(self) -> int:
        """Rows that every usable replica takes in one call; 0 when none is usable or one does not tell."""
        return min((draft.max_rows for draft in self._drafts.values() if draft.is_usable), default=0)

    @property
    def description(self) -> ModelDescription | None:
        """Description of one replica, preferably one that is up; None without any."""
        replicas = [draft.replica for draft in self._drafts.values()]
        return next((one.description for one in sorted(replicas, key=lambda one: not one.is_up)), None)

    @property
    def models(self) -> list[ModelDescription]:
        """Descriptions of the replicas that are up."""
        return models_up(draft.replica for draft in self._drafts.values())

    def describe(self) -> list[ReplicaDescription]:
        return [draft.describe() for draft in self._drafts.values()]

    def changed(self, replica: Replica[RemoteDraft]) -> None:
        """Take in a new replica; let the generations of a replica go when it is about to leave."""
        if replica.address not in self._drafts:
            self._drafts[replica.address] = self._guard(replica)
        replica.remote.listen(self._take_prepared)
        if replica.state is ReplicaState.DRAINING:
            # The look that found it draining also tells it what it may free.
            replica.remote.owe(self._evict(self._drafts[replica.address]))

    def left(self, replica: Replica[RemoteDraft]) -> None:
        """Forget a replica that is gone."""
        self._evict(self._drafts.pop(replica.address))

    def look_anew(self, reason: PacelineError) -> None:
        """Ask no replica before it was looked at again."""
        for draft in self._drafts.values():
            draft.replica.lose(reason)

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        """Ask the replicas of the rows in parallel. Raise a PacelineError when all of them failed."""
        results: dict[int, Proposal | PacelineError] = {}
        parts: defaultdict[GuardedDraft, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if (home := self._home(row)) is None:
                results[index] = PrefixNotCached(f"{row.sequence_id} is new to its draft; send it whole")
            else:
                parts[home].append(index)
        calls = [_answer(draft, [rows[index] for index in part], deadline) for draft, part in parts.items()]
        try:
            answers = await results_of(calls)
        finally:
            self._owe_left(rows, parts)
        failures = [answer for answer in answers if isinstance(answer, PacelineError)]
        if failures and len(failures) == len(answers):
            raise failures[0]
        for part, answer in zip(parts.values(), answers, strict=True):
            outcomes = answer.results if isinstance(answer, Proposals) else [answer] * len(part)
            results |= dict(zip(part, outcomes, strict=True))
        timing = timing_of_all(answer for answer in answers if isinstance(answer, Proposals))
        return Proposals([results[index] for index in range(len(rows))], timing)

    def _owe_left(self, rows: Sequence[ProposeRow], parts: Mapping[GuardedDraft, Sequence[int]]) -> None:
        """Leave sequences to be freed that left their replicas during a call.

        A replica was told to free them then, and may have served the call after that.
        """
        for draft, part in parts.items():
            names = [rows[index].sequence_id for index in part]
            draft.replica.remote.owe([name for name in names if self._homes.get(name) is not draft])

    def _home(self, row: ProposeRow) -> GuardedDraft | None:
        """Return the replica to ask; None when the row relies on a cache that the replica does not have."""
        home = self._homes.get(row.sequence_id)
        if home and home.is_usable:
            return home
        usable = [draft for draft in self._drafts.values() if draft.is_usable]
        if not usable:
            raise PeerUnavailable("no draft service is to be asked now")
        if home:
            self._leave(row.sequence_id, home)
        home = self._new_home(row, usable)
        self._homes[row.sequence_id] = home
        home.sequence_ids.add(row.sequence_id)
        return home if row.base_length == 0 else None

    def _new_home(self, row: ProposeRow, usable: list[GuardedDraft]) -> GuardedDraft:
        """Choose a replica by the part of the prompt that the row brings, or else by load."""
        beginnings: Beginnings = ()
        if not row.base_length:
            beginnings = beginnings_of(row.token_ids, len(row.token_ids) + bool(row.following_count))
        home = self._stickiness.home(usable, usable, beginnings) or min(usable, key=lambda draft: draft.load)
        self._stickiness.note(home, usable, beginnings)
        return home

    def _leave(self, sequence_id: str, home: GuardedDraft) -> None:
        del self._homes[sequence_id]
        home.sequence_ids.discard(sequence_id)
        home.replica.remote.owe([sequence_id])

    def _evict(self, draft: GuardedDraft) -> list[str]:
        sequence_ids = list(draft.sequence_ids)
        draft.sequence_ids.clear()
        for sequence_id in sequence_ids:
            del self._homes[sequence_id]
        return sequence_ids

    def owe(self, sequence_ids: list[str]) -> None:
        """Leave sequences to be freed where they are."""
        parts: defaultdict[GuardedDraft, list[str]] = defaultdict(list)
        for sequence_id in sequence_ids:
            if home := self._homes.pop(sequence_id, None):
                home.sequence_ids.discard(sequence_id)
                parts[home].append(sequence_id)
        for draft, part in parts.items():
            draft.replica.remote.owe(part)

    async def release(self) -> int:
        """Free what is owed. A replica that is away is told when it is back."""
        owing = [one.replica.remote for one in self._drafts.values() if one.replica.is_up]
        return sum(await asyncio.gather(*(remote.release() for remote in owing if remote.owed_count)))


async def _answer(draft: GuardedDraft, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals | PacelineError:
    """Ask one replica; return its error, so that the drafts of the others are not lost."""
    try:
        return await draft.propose(rows, deadline)
    except PacelineError as error:
        return error
