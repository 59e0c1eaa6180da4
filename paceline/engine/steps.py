"""Several steps of some sequences in a row: a token is chosen after each row, fed back, and the next one is chosen.

It owns the order of the steps. It knows nothing of why they are made.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from paceline.checks import MAX_PROPOSED_COUNT
from paceline.engine.cache.paged import KvPool
from paceline.engine.interfaces import let_go
from paceline.engine.passes import Piece, RankedStepPasses, StepPasses
from paceline.engine.placing import PackedRow
from paceline.engine.row_choice import RankedToken
from paceline.engine.runner import PassSize, Runner, ScoredPart
from paceline.errors import PacelineError, as_result
from paceline.types import ChoiceRule, Prefilled


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row without draft tokens, after which `count` tokens are to be chosen."""

    row: PackedRow
    rule: ChoiceRule
    count: int

    def __post_init__(self) -> None:
        assert 1 <= self.count <= MAX_PROPOSED_COUNT


StepOutcome = list[int] | Prefilled | PacelineError
"""The tokens chosen, fewer if one could not be; how far a long row got; or why the row could not run."""
RankedOutcome = list[list[RankedToken]] | PacelineError
"""The likeliest tokens of each step, the one chosen first; or why the row could not run."""
PlaceT = TypeVar("PlaceT")


@dataclass(frozen=True, slots=True)
class _Making(Generic[PlaceT]):
    """How steps are made at once."""

    make: Callable[[Sequence[Piece], Sequence[ChoiceRule], Sequence[int]], list[list[PlaceT]]]
    token_id: Callable[[PlaceT], int]
    """What was chosen at a place."""


class Steps:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        passes: object = runner.passes
        self._at_once = passes if isinstance(passes, StepPasses) else None
        self._ranking = passes if isinstance(passes, RankedStepPasses) else None

    def run(self, rows: Sequence[StepRow]) -> list[StepOutcome]:
        """Run the rows and return their outcomes. All chosen tokens but the last are cached afterwards.

        A row that has its tokens leaves the later passes. Where passes can, they make all steps of short rows at once.
        """
        at_once = {index: row for index, row in enumerate(rows) if self.can_run_at_once(row)}
        apart = {index: row for index, row in enumerate(rows) if index not in at_once}
        outcomes = dict[int, StepOutcome]()
        if self._at_once and at_once:
            outcomes |= self._in_parts(at_once, self._at_once, _Making(self._at_once.steps, int))
        outcomes |= self._one_by_one(apart)
        return [outcomes[index] for index in range(len(rows))]

    def can_run_at_once(self, one: StepRow) -> bool:
        passes, row = self._at_once, one.row
        can_step = passes is not None and passes.can_step(len(row.token_ids), one.rule)
        return can_step and not row.following_count

    def can_rank(self, one: StepRow) -> bool:
        """Return whether `ranked` can run the row."""
        return self._ranking is not None and self.can_run_at_once(one)

    def ranked(self, rows: Sequence[StepRow], ranked_count: int) -> list[RankedOutcome]:
        """Run rows of which `can_rank` holds; return what might be chosen at each step, the choice first."""
        if not rows:
            return []
        assert self._ranking
        making = _Making(partial(self._ranking.ranked_steps, ranked_count=ranked_count), _first_token)
        outcomes = self._in_parts(dict(enumerate(rows)), self._ranking, making)
        return [outcomes[index] for index in range(len(rows))]

    def _one_by_one(self, rows: Mapping[int, StepRow]) -> dict[int, StepOutcome]:
        chosen: dict[int, list[int]] = {index: [] for index in rows}
        outcomes: dict[int, StepOutcome] = {}
        pending = list(rows)
        while pending:
            step = self._step([_next(rows[index], chosen[index]) for index in pending])
            for index, outcome in zip(pending, step, strict=True):
                if isinstance(outcome, int):
                    chosen[index].append(outcome)
                else:
                    outcomes[index] = chosen[index] if outcome is None else outcome
            pending = [index for index in pending if index not in outcomes and len(chosen[index]) < rows[index].count]
        return chosen | outcomes

    def _step(self, rows: Sequence[StepRow]) -> list[int | Prefilled | PacelineError | None]:
        """Return the next tokens; None says that none can be chosen, so the row ends here."""
        parts = self._runner.parts([one.row.logit_count for one in rows])
        return [outcome for part in parts for outcome in self._step_part(rows[part])]

    def _step_part(self, rows: Sequence[StepRow]) -> list[int | Prefilled | PacelineError | None]:
        """Run one pass for rows whose logits are held together."""
        runner = self._runner
        # No row is scored.
        outcomes = [one for one in runner.forward([one.row for one in rows]) if not isinstance(one, ScoredPart)]
        choosing = [
            runner.choosing(one.row.sequence_id, outcome, one.rule, runner.cache.token_ids(one.row.sequence_id))
            for one, outcome in zip(rows, outcomes, strict=True)
            if isinstance(outcome, Tensor)
        ]
        choices = (choice if isinstance(choice, int) else None for (choice,) in runner.choose(choosing))
        return [next(choices) if isinstance(outcome, Tensor) else outcome for outcome in outcomes]

    def _in_parts(
        self, rows: Mapping[int, StepRow], passes: StepPasses, making: _Making[PlaceT]
    ) -> dict[int, list[PlaceT] | PacelineError]:
        indices, outcomes = list(rows), dict[int, list[PlaceT] | PacelineError]()
        longest = max(len(one.row.token_ids) for one in rows.values())
        size = min(passes.most_rows(longest), self._runner.most_logits)
        for start in range(0, len(indices), size):
            outcomes |= self._all_at_once({index: rows[index] for index in indices[start : start + size]}, making)
        return outcomes

    def _all_at_once(
        self, rows: Mapping[int, StepRow], making: _Making[PlaceT]
    ) -> dict[int, list[PlaceT] | PacelineError]:
        """Run rows that share as many passes as the largest count."""
        placed: dict[int, Piece | PacelineError] = {}
        for index in sorted(rows, key=lambda one: self._runner.owners.age_order(rows[one].row.sequence_id)):
            held = {piece.sequence_id for piece in placed.values() if isinstance(piece, Piece)}
            placed[index] = self._placed(rows[index], held)
        pieces = {index: piece for index, piece in placed.items() if isinstance(piece, Piece)}
        made = self._made([*pieces.values()], [rows[index] for index in pieces], making)
        refused = {index: one for index, one in placed.items() if isinstance(one, PacelineError)}
        return {**refused, **dict(zip(pieces, made, strict=True))}

    def _made(
        self, pieces: Sequence[Piece], rows: Sequence[StepRow], making: _Making[PlaceT]
    ) -> Sequence[list[PlaceT] | PacelineError]:
        """Return what was made after each piece, which stands for the row."""
        runner = self._runner
        rules, counts = [one.rule for one in rows], [one.count for one in rows]
        try:
            made = runner.guarded(pieces, lambda: making.make(pieces, rules, counts))
        except BaseException:
            for piece in pieces:
                let_go(runner.cache, piece.sequence_id, piece.base_length)
            raise
        for step in range(max(counts, default=0)):
            active = sum(count > step for count in counts)
            runner.on_pass(PassSize(active, active if step else sum(len(one.token_ids) for one in pieces), 0))
        for piece, outcome in zip(pieces, made, strict=True):
            if isinstance(outcome, PacelineError):
                let_go(runner.cache, piece.sequence_id, piece.base_length)
            else:
                self._settle(piece, [*map(making.token_id, outcome)])
        return made

    def _settle(self, piece: Piece, chosen: Sequence[int]) -> None:
        """Write the choices into the cache, where zeros stand for them."""
        cache = self._runner.cache
        assert isinstance(cache, KvPool)
        cache.truncate(piece.sequence_id, piece.length + max(0, len(chosen) - 1))
        cache.fill(piece.sequence_id, chosen[:-1])
        cache.seal(piece.sequence_id, piece.length)

    def _placed(self, one: StepRow, held: Collection[str]) -> Piece | PacelineError:
        """Make room for the row and its tokens to come; the sequences in `held` keep their cache."""
        row, room = one.row, self._runner.room
        try:
            room.check(row.sequence_id, is_relying=row.base_length > 0)
            self._runner.cache.keep(row.sequence_id, row.base_length, ())
            # Zeros stand for the tokens to come, which are known only afterwards.
            room.append(row.sequence_id, row.token_ids + (0,) * (one.count - 1), held)
        except PacelineError as error:
            return as_result(error)
        return Piece(row.sequence_id, row.base_length, row.token_ids, 1)


def _first_token(place: Sequence[RankedToken]) -> int:
    return place[0].token_id


def _next(one: StepRow, chosen: Sequence[int]) -> StepRow:
    """Return the row as the next pass takes it: its last chosen token, if there is one."""
    if not chosen:
        return one
    base_length = one.row.base_length + len(one.row.token_ids) + len(chosen) - 1
    return replace(one, row=PackedRow(one.row.sequence_id, base_length, (chosen[-1],)))
