"""The drafter, which proposes draft tokens for some sequences: several steps of each, or what was prepared.

It owns what a proposal is; `preparing` owns what is made between calls, and the engine owns the steps and the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draft_service.preparing import RANKED_COUNT, Preparing, Taken
from paceline.checks import MAX_PREPARED_COUNT, MAX_PROPOSED_COUNT, check_row
from paceline.engine.calls import Call
from paceline.engine.interfaces import let_go
from paceline.engine.placing import PackedRow
from paceline.engine.row_choice import RankedToken
from paceline.engine.rules import rule_of
from paceline.engine.runner import Runner
from paceline.engine.steps import StepOutcome, StepRow, Steps
from paceline.errors import InvalidRequest, PacelineError
from paceline.scope import Caller
from paceline.types import ChoiceRule, Prefilled, Proposal, ProposeRow


@dataclass(frozen=True, slots=True)
class _Made:
    """What the steps of a row made."""

    outcome: StepOutcome
    ranked: Sequence[Sequence[RankedToken]] = ()
    """The likeliest tokens of each step, where the steps say them."""


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.preparing = Preparing(runner)
        self._steps = Steps(runner)

    def propose_calls(self, calls: Sequence[Call[ProposeRow]]) -> list[list[Proposal | PacelineError]]:
        """Return for each call its rows' proposals or errors, in the order of its rows.

        The last draft token is not fed back, so it is not cached: if all are accepted, the next call appends it
        together with the target's next token, and no pass is spent on catching up. A long prompt that was taken in
        part has no drafts yet. Drafts end before a place where no token can be chosen. Calls that are served together
        must not share sequences.
        """
        ruled = self.runner.ruled([self._without_unknown_tokens(call) for call in calls], self._check)
        rows = ruled.rows
        taken = [self.preparing.take(row) for row in rows]
        lacking = [_step_row(row, one) for row, one in zip(rows, taken, strict=True) if _lacks(row, one)]
        try:
            made = iter(self._made(lacking, is_ranked=any(row.prepare_count for row in rows)))
        except BaseException:
            for row in rows:  # its sequence was cut
                self.preparing.end(row.sequence_id)
            raise
        outcomes = [next(made) if _lacks(row, one) else _Made([]) for row, one in zip(rows, taken, strict=True)]
        return ruled.results(list(map(self._answer, rows, ruled.names, outcomes, taken)))

    def propose(self, rows: Sequence[ProposeRow], scope: str = "") -> list[Proposal | PacelineError]:
        """Return the results of a single call."""
        return self.propose_calls([Call(rows, Caller(scope=scope))])[0]

    def _made(self, rows: Sequence[StepRow], *, is_ranked: bool) -> list[_Made]:
        """Make the steps, and have them ranked where that takes no further passes."""
        if not is_ranked or not all(map(self._steps.can_rank, rows)):
            return [*map(_Made, self._steps.run(rows))]
        return [
            _Made(one) if isinstance(one, PacelineError) else _Made([place[0].token_id for place in one], one)
            for one in self._steps.ranked(rows, RANKED_COUNT)
        ]

    def _answer(self, row: ProposeRow, name: str, made: _Made, taken: Taken | None) -> Proposal | PacelineError:
        """Return the row's proposal: what was prepared, and what the steps after it made."""
        outcome = made.outcome
        if isinstance(outcome, PacelineError | Prefilled):
            self.preparing.end(row.sequence_id)
            if isinstance(outcome, Prefilled):
                return Proposal((), outcome.cached_length)
            if taken and self.runner.cache.length(row.sequence_id):  # an older row may have taken its cache
                let_go(self.runner.cache, row.sequence_id, row.base_length)
            return outcome
        drafts = (*taken.draft_token_ids, *outcome) if taken else tuple(outcome)
        self.preparing.follow(row, name, drafts, taken, made.ranked)
        # The last draft token is not cached.
        return Proposal(drafts, row.base_length + len(row.token_ids) + len(drafts) - 1, taken is not None)

    def _without_unknown_tokens(self, call: Call[ProposeRow]) -> Call[ProposeRow]:
        """Leave out of the rules what this model can never choose: tokens that the target's tuning added, say."""
        if not any(row.rule for row in call.rows):
            return call  # all but the first rows of sequences
        size = self.runner.model.description.vocabulary_size
        rows = [replace(row, rule=_within(row.rule, size)) if row.rule else row for row in call.rows]
        return replace(call, rows=rows)

    def _check(self, row: ProposeRow) -> None:
        if not 1 <= row.draft_count <= MAX_PROPOSED_COUNT:
            raise InvalidRequest(
                f"draft_count is {row.draft_count}; ask for 1 to {MAX_PROPOSED_COUNT}", field="draft_count"
            )
        if not 0 <= row.prepare_count <= MAX_PREPARED_COUNT:
            raise InvalidRequest(
                f"prepare_count is {row.prepare_count}; give 0 to {MAX_PREPARED_COUNT}", field="prepare_count"
            )
        check_row(row, self.runner.limits, row.draft_count - 1)


def _within(rule: ChoiceRule, vocabulary_size: int) -> ChoiceRule:
    """Return the rule without tokens beyond the vocabulary."""
    ends = tuple(one for one in rule.end_token_ids if one < vocabulary_size)
    biases = tuple(one for one in rule.sampling.logit_bias if one[0] < vocabulary_size)
    return replace(rule, end_token_ids=ends, sampling=replace(rule.sampling, logit_bias=biases))


def _lacks(row: ProposeRow, taken: Taken | None) -> bool:
    """Return whether steps must be made for the row, beside what was prepared."""
    return taken is None or len(taken.draft_token_ids) < row.draft_count


def _step_row(row: ProposeRow, taken: Taken | None) -> StepRow:
    """Return the steps that the row asks for: all, or those after the drafts that were prepared."""
    if taken is None:
        packed = PackedRow(row.sequence_id, row.base_length, row.token_ids, following_count=row.following_count)
        return StepRow(packed, rule_of(row), row.draft_count)
    drafts = taken.draft_token_ids
    base_length = row.base_length + len(row.token_ids) + len(drafts) - 1
    return StepRow(PackedRow(row.sequence_id, base_length, drafts[-1:]), rule_of(row), row.draft_count - len(drafts))
