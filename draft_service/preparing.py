"""Drafts that are prepared: computed between calls, after outcomes that are likely to come (SSD, arXiv 2603.03251).

After a row is answered, its sequence has a tree of outcomes (`outcome_tree`), and each `work` computes the likeliest
guesses of all trees in one pass, and the draft's choices after them where passes make steps at once. The noise of a
choice depends on seed, position and token alone, so what is chosen after a guess is what a later row would be given. A
row that comes to a computed place is a hit: its sequence adopts what the branch there has cached.

Owns the trees and their branches in the cache. A tree lives until its sequence is released, cut, or goes another way.
Knows nothing of calls. All of it runs in the model's thread.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from draft_service.outcome_tree import Guess, Misses, OutcomeTree, Place, drafts_after
from paceline.checks import MAX_SEQUENCE_ID_LENGTH
from paceline.engine.cache.paged import KvPool
from paceline.engine.placing import PackedRow
from paceline.engine.row_choice import RankedToken
from paceline.engine.rules import rule_of
from paceline.engine.runner import Outcome, Runner
from paceline.engine.sampling import Choosing
from paceline.engine.steps import StepRow, Steps
from paceline.errors import CacheFull
from paceline.prefix_hash import PrefixHash, extended_hash
from paceline.scope import Caller
from paceline.types import ChoiceRule, PreparedDrafts, ProposeRow

RANKED_COUNT = 8
"""Tokens that the target may choose at a place."""
PASS_ROWS = 5
"""Guesses computed together, or one for each caller where these are more: a call that comes meanwhile waits."""
MOST_STEPS = 4
"""Tokens of a guess and of the draft's choices after it that are computed at once, where passes can make steps."""
ROOMY_PAGES = PASS_ROWS * (1 + MOST_STEPS)
"""Free pages with which no steps lack room; with fewer, guesses are computed token by token."""
_BRANCH = "branch".ljust(2 * MAX_SEQUENCE_ID_LENGTH, "-")
"""Before the numbers of branches: longer than any id that a caller can give, with its scope."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Drafts that were prepared for a row, and are cached now for its sequence, all but the last."""

    draft_token_ids: tuple[int, ...]
    place: Place
    """The end of the row."""


@dataclass(eq=False)
class _Prepared:
    """A sequence for which drafts are prepared."""

    sequence_id: str
    """Its id in the cache."""
    name: str
    """Its id as its caller knows it."""
    rule: ChoiceRule
    length: int
    """Its committed tokens, which the cached sequence begins with."""
    drafts: tuple[int, ...]
    """Its drafts when it was answered last: the first places of its tree."""
    ranked: Sequence[Sequence[RankedToken]]
    """What might have been chosen in place of each of them; nothing where the steps did not say."""
    hash: int
    tree: OutcomeTree
    branch_ids: set[str]
    came_to: Place | None = None
    """Where its last row ended, if the tree is to be moved there still: the row is answered first."""

    @property
    def chance(self) -> float:
        """Chance of what is to be computed next; 0 for nothing."""
        return self.tree.best_chance if self.tree.root else 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    """Tokens that a pass computes on a branch."""

    owner: _Prepared
    guess: Guess | None
    """None: they are the sequence's last committed token and its drafts."""
    run: PackedRow | StepRow
    """A row alone, or with further places to compute, each after the draft's choice at the one before."""

    @property
    def row(self) -> PackedRow:
        return self.run.row if isinstance(self.run, StepRow) else self.run


_Places = list[list[RankedToken]]
"""Ranked tokens after each token of a job."""


class Preparing:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps = Steps(runner)
        # The dense layout has no branches: a copy of a sequence would be one of all its tokens.
        self._pool = runner.cache if isinstance(runner.cache, KvPool) else None
        self._prepared: dict[str, _Prepared] = {}
        self._numbers = count()
        self._misses = {is_sampled: Misses() for is_sampled in (False, True)}
        runner.on_changed = self.end

    def take(self, row: ProposeRow) -> Taken | None:
        """Return the prepared drafts of a row, at most as many as it asks for; None without any.

        Its sequence has the row's tokens and these drafts cached then, all but the last draft.
        """
        owner = self._prepared.get(row.sequence_id)
        if owner is None or self._pool is None or row.following_count or owner.rule != row.rule:
            return None
        self._move(owner)
        tokens = self._beyond_root(owner, row)
        if tokens is None:
            return None
        owner.tree.learn(tokens)
        place = owner.tree.find(tokens)
        if place is None or not place.ranked:
            return None
        drafts, last = drafts_after(place, row.draft_count)
        is_held = self._pool.adopt(row.sequence_id, row.base_length, last.branch_id, last.length)
        return Taken(drafts, place) if is_held else None

    def _beyond_root(self, owner: _Prepared, row: ProposeRow) -> Sequence[int] | None:
        """Return the tokens of the row's sequence after those that were committed before; None if those differ."""
        held = self._runner.cache.token_ids(row.sequence_id)
        start = min(row.base_length, owner.length)
        tokens = (*held[start : row.base_length], *row.token_ids)
        known = owner.length - start
        return tokens[known:] if tokens[:known] == tuple(held[start : owner.length]) else None

    def follow(
        self,
        row: ProposeRow,
        name: str,
        drafts: tuple[int, ...],
        taken: Taken | None,
        ranked: Sequence[Sequence[RankedToken]] = (),
    ) -> None:
        """Prepare what may come after a row that was answered with `drafts`; `name` is its caller's id for it.

        `ranked` is what might have been chosen in place of each draft, where that is known. What was prepared for the
        row before and did not come is dropped.
        """
        owner = self._prepared.get(row.sequence_id)
        is_cached = self._runner.cache.length(row.sequence_id) > 0  # an older row may have taken its cache
        if self._pool is None or not row.prepare_count or not drafts or not is_cached:
            self.end(row.sequence_id)
            return
        length = row.base_length + len(row.token_ids)
        if owner and taken:
            owner.length = length
            owner.tree.limit = row.prepare_count
            owner.came_to = taken.place
            return
        self.end(row.sequence_id)
        held = self._runner.cache.token_ids(row.sequence_id)
        base_hash = PrefixHash().of(held, row.base_length) if row.base_hash is None else row.base_hash
        self._prepared[row.sequence_id] = _Prepared(
            row.sequence_id,
            name,
            rule_of(row),
            length,
            drafts[: self._most_length - length],
            () if taken else ranked,
            extended_hash(base_hash, row.token_ids),
            OutcomeTree(row.prepare_count, self._misses[rule_of(row).sampling.temperature > 0]),
            set(),
        )

    def end(self, sequence_id: str) -> None:
        """Drop what is prepared for a sequence."""
        if owner := self._prepared.pop(sequence_id, None):
            for branch_id in owner.branch_ids:
                self._runner.cache.release(branch_id)

    def work(self) -> list[tuple[str, PreparedDrafts]] | None:
        """Compute the likeliest guesses; return what is new, with cached ids; None if nothing is to do."""
        jobs = self._jobs()
        if not jobs:
            return None
        outcomes = self._computed(jobs)
        for job, outcome in outcomes:
            # Room that was made for one job may have ended what is prepared for another.
            if isinstance(outcome, CacheFull) and self._lives(job.owner) and self._make_room(job.owner):
                _take_back(job)
        living = [(job, one) for job, one in outcomes if isinstance(one, list) and self._lives(job.owner)]
        found = [(job.owner.sequence_id, _grown(job, places)) for job, places in living]
        return [(sequence_id, drafts) for sequence_id, drafts in found if drafts]

    def _computed(self, jobs: Sequence[_Job]) -> list[tuple[_Job, _Places | Outcome]]:
        """Return the jobs with what they found, or why they could not run: by steps at once those that can be."""
        stepping = [(job, job.run) for job in jobs if isinstance(job.run, StepRow)]
        passing = [job for job in jobs if isinstance(job.run, PackedRow)]
        outcomes = [*self._steps.ranked([run for _, run in stepping], RANKED_COUNT), *self._passed(passing)]
        return [*zip([*(job for job, _ in stepping), *passing], outcomes, strict=True)]

    def _passed(self, jobs: Sequence[_Job]) -> list[_Places | Outcome]:
        outcomes = self._runner.forward([job.row for job in jobs]) if jobs else []
        made = {index: one for index, one in enumerate(outcomes) if isinstance(one, torch.Tensor)}
        choosing = [self._choosing(jobs[index], logits) for index, logits in made.items()]
        places = dict(zip(made, self._runner.ranked(choosing, RANKED_COUNT) if made else [], strict=True))
        return [places.get(index, outcome) for index, outcome in enumerate(outcomes)]

    def _lives(self, owner: _Prepared) -> bool:
        return self._prepared.get(owner.sequence_id) is owner

    def _choosing(self, job: _Job, logits: torch.Tensor) -> Choosing:
        row = job.row
        prefix = self._runner.cache.token_ids(row.sequence_id)[: row.base_length + 1]
        return self._runner.choosing(job.owner.sequence_id, logits, job.owner.rule, prefix, row.token_ids[1:])

    @property
    def _most_length(self) -> int:
        limits = self._runner.limits
        return min(limits.model_max_length, limits.cache_max_length)

    def _jobs(self) -> list[_Job]:
        """Return what is to be computed next. Callers have equal shares of it."""
        callers: dict[Caller, list[_Prepared]] = {}
        for one in self._prepared.values():
            self._move(one)
            if one.chance:
                callers.setdefault(self._caller(one), []).append(one)
        jobs: list[_Job] = []
        growing: set[str] = set()
        for owners in callers.values():
            left = max(1, PASS_ROWS // len(callers))
            while left:
                # Room that was made for another may have ended some of them.
                owner = max(filter(self._lives, owners), key=lambda one: one.chance, default=None)
                if owner is None or not owner.chance:
                    break
                try:
                    job = self._job(owner, growing)
                except CacheFull:
                    if self._make_room(owner):
                        continue
                    break
                if job:
                    growing.add(job.row.sequence_id)
                    jobs.append(job)
                    left -= 1
        return [job for job in jobs if self._lives(job.owner)]

    def _job(self, owner: _Prepared, growing: set[str]) -> _Job | None:
        """Return the next job of a sequence; None if no guess is left. The branches `growing` are in use by others."""
        if owner.tree.root is None:
            if not owner.ranked:
                return self._first_job(owner)
            self._begin(owner)
        while owner.tree.best_chance:
            guess = owner.tree.pop()
            parent = guess.parent
            cached_length = self._runner.cache.length(parent.branch_id)
            if not cached_length or parent.length >= self._most_length or guess.token_id in parent.children:
                continue
            branch_id = parent.branch_id
            if cached_length > parent.length or branch_id in growing:
                try:
                    branch_id = self._fork(owner, branch_id, parent.length)
                except CacheFull:
                    owner.tree.push(guess)
                    raise
            return self._guess_job(owner, guess, branch_id)
        return None

    def _guess_job(self, owner: _Prepared, guess: Guess, branch_id: str) -> _Job:
        length = guess.parent.length
        assert self._pool
        tree, is_roomy = owner.tree, self._pool.free_count >= ROOMY_PAGES
        # They take half of the tree's room, at most: what is found shows where to go on.
        most = min(MOST_STEPS, round(tree.misses.run), self._most_length - length, tree.room // (2 * PASS_ROWS))
        row = PackedRow(branch_id, length, (guess.token_id,))
        steps = StepRow(row, owner.rule, max(1, most) if is_roomy else 1)
        return _Job(owner, guess, steps if self._steps.can_rank(steps) else row)

    def _begin(self, owner: _Prepared) -> None:
        """Grow the tree of a sequence whose drafts were ranked when they were chosen; all but the last are cached."""
        first, *others = owner.ranked
        known = others[: len(owner.drafts)]
        # The sequence's next row may cut its drafts off.
        branch_id = self._fork(owner, owner.sequence_id, owner.length + len(known), owner.length)
        root = Place(owner.length, owner.hash, branch_id, first, 1.0)
        owner.tree.move_root(root)
        owner.tree.grow(root, owner.drafts[: len(known)], branch_id, known)
        owner.tree.limit += len(known)  # they were not prepared

    def _first_job(self, owner: _Prepared) -> _Job:
        """Return the job that computes the drafts again, all at once: the steps said nothing of the runners-up."""
        base_length = owner.length - 1
        last = self._runner.cache.token_ids(owner.sequence_id)[base_length]
        branch_id = self._fork(owner, owner.sequence_id, base_length)
        # Its ranked tokens come with the pass.
        owner.tree.root = Place(owner.length, owner.hash, branch_id, (), 1.0)
        return _Job(owner, None, PackedRow(branch_id, base_length, (last, *owner.drafts), len(owner.drafts)))

    def _fork(self, owner: _Prepared, sequence_id: str, length: int, kept_length: int | None = None) -> str:
        assert self._pool
        branch_id = f"{_BRANCH}{next(self._numbers)}"
        self._pool.fork(sequence_id, length, branch_id, kept_length)
        owner.branch_ids.add(branch_id)
        return branch_id

    def _move(self, owner: _Prepared) -> None:
        """Move a tree to where its sequence has come, and free the branches that no place of it needs any more."""
        if owner.came_to is None:
            return
        root, owner.came_to = owner.came_to, None
        owner.tree.move_root(root)
        needed = {place.branch_id for place in root.below()}
        for branch_id in owner.branch_ids - needed:
            self._runner.cache.release(branch_id)
        owner.branch_ids &= needed

    def _caller(self, owner: _Prepared) -> Caller:
        return self._runner.owners.caller(owner.sequence_id)

    def _make_room(self, crowded: _Prepared) -> bool:
        """Let go of what is prepared for the caller with the most branches, if it is another one; return whether."""
        counts = Counter[Caller]()
        for owner in self._prepared.values():
            counts[self._caller(owner)] += len(owner.branch_ids)
        ((caller, most),) = counts.most_common(1)
        if most <= counts[self._caller(crowded)] + 1:
            return False
        owners = [one for one in self._prepared.values() if self._caller(one) == caller]
        self.end(max(owners, key=lambda one: len(one.branch_ids)).sequence_id)
        return True


def _take_back(job: _Job) -> None:
    """Have a job that found no room made again."""
    tree = job.owner.tree
    if job.guess:
        tree.push(job.guess)
    else:
        tree.root = None


def _grown(job: _Job, ranked_tokens: Sequence[Sequence[RankedToken]]) -> PreparedDrafts | None:
    """Take a job's ranked tokens into its tree; return the drafts after the guess, or after the drafts told before."""
    owner, tree, row = job.owner, job.owner.tree, job.row
    if job.guess:
        ranked_tokens = ranked_tokens or [[]]  # no token can be chosen after the guess
        chosen = [place[0].token_id for place in ranked_tokens[:-1]]
        tree.grow(job.guess.parent, (*row.token_ids, *chosen), row.sequence_id, ranked_tokens)
        place = job.guess.parent.children[job.guess.token_id]
    else:
        assert tree.root
        tree.root.ranked = ranked_tokens[0]
        tree.move_root(tree.root)
        place = tree.grow(tree.root, owner.drafts, row.sequence_id, ranked_tokens[1:])
    drafts, _ = drafts_after(place, len(ranked_tokens))
    return PreparedDrafts(owner.name, place.length, place.hash, drafts) if drafts else None
