"""The drafter, which proposes draft tokens for a group of sequences: several steps of each.

It owns what a proposal is; the engine owns the steps and the cache.
"""

from collections.abc import Sequence

from paceline.checks import MAX_PROPOSED_COUNT, check_row
from paceline.engine.placing import PackedRow
from paceline.engine.rules import rule_of
from paceline.engine.runner import Runner
from paceline.engine.steps import StepOutcome, StepRow, Steps
from paceline.errors import InvalidRequest, PacelineError
from paceline.types import Prefilled, Proposal, ProposeRow


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._steps = Steps(runner)

    def propose(self, rows: Sequence[ProposeRow], scope: str = "") -> list[Proposal | PacelineError]:
        """Return each row's proposal or error, in the order of `rows`.

        The last draft token is not fed back, so it is not cached: if all are accepted, the next call appends it
        together with the target's next token, and no pass is spent on catching up. A long prompt that was taken in
        part has no drafts yet. Drafts end before a place where no token can be chosen. `scope` sets the caller's
        sequences apart from those of others.
        """
        rows, errors = self.runner.ruled(rows, scope, self._check)
        live = [row for index, row in enumerate(rows) if index not in errors]
        outcomes = iter(self._steps.run([_step_row(row) for row in live]))
        return [errors.get(index) or _proposal(row, next(outcomes)) for index, row in enumerate(rows)]

    def _check(self, row: ProposeRow) -> None:
        if not 1 <= row.draft_count <= MAX_PROPOSED_COUNT:
            raise InvalidRequest(
                f"draft_count is {row.draft_count}; ask for 1 to {MAX_PROPOSED_COUNT}", field="draft_count"
            )
        check_row(row, self.runner.limits, row.draft_count - 1)


def _step_row(row: ProposeRow) -> StepRow:
    packed = PackedRow(row.sequence_id, row.base_length, row.token_ids, following_count=row.following_count)
    return StepRow(packed, rule_of(row), row.draft_count)


def _proposal(row: ProposeRow, outcome: StepOutcome) -> Proposal | PacelineError:
    if isinstance(outcome, PacelineError):
        return outcome
    if isinstance(outcome, Prefilled):
        return Proposal((), outcome.cached_length)
    # The last draft token is not cached.
    return Proposal(tuple(outcome), row.base_length + len(row.token_ids) + len(outcome) - 1)
