"""Propose draft tokens for a group of sequences, one packed pass a token.

Owns the steps of a proposal; the runner owns the cache. Rows may want different counts: a row that has its drafts
leaves the later passes.
"""

from collections.abc import Sequence

from torch import Tensor

from paceline.checks import check_row, row_errors
from paceline.engine.runner import PackedRow, Runner
from paceline.engine.sampling import Choosing, choose
from paceline.errors import InvalidRequest, PacelineError
from paceline.sampling_checks import check_sampling
from paceline.types import Prefilled, Proposal, ProposeRow


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | PacelineError]:
        """Return each row's proposal, or why it has none, in the order of `rows`.

        The last draft token is not fed back, so it is not cached: if all are accepted, the next call appends it
        together with the target's next token, and no pass is spent on catching up. A long prompt that was taken in
        part has no drafts yet.
        """
        results: dict[int, Proposal | PacelineError] = dict(row_errors(rows, self._check))
        drafts: dict[int, list[int]] = {index: [] for index in range(len(rows)) if index not in results}
        pending = list(drafts)
        while pending:
            for index, outcome in zip(pending, self._step([(rows[i], drafts[i]) for i in pending]), strict=True):
                if isinstance(outcome, int):
                    drafts[index].append(outcome)
                elif isinstance(outcome, Prefilled):
                    results[index] = Proposal((), outcome.cached_length)
                else:
                    results[index] = outcome
            pending = [i for i in pending if i not in results and len(drafts[i]) < rows[i].draft_count]
        return [
            results.get(index) or Proposal(tuple(drafts[index]), _cached_length(row, drafts[index]))
            for index, row in enumerate(rows)
        ]

    def _step(self, rows: Sequence[tuple[ProposeRow, list[int]]]) -> list[int | Prefilled | PacelineError]:
        """Run one pass: a row's committed tokens at first, then its last draft token. Return the next draft tokens."""
        outcomes = self.runner.forward(
            [
                PackedRow(row.sequence_id, _cached_length(row, drafts), tuple(drafts[-1:]))
                if drafts
                else PackedRow(row.sequence_id, row.base_length, row.token_ids)
                for row, drafts in rows
            ]
        )
        choosing = [
            Choosing(outcome, row.rule, self.runner.cache.token_ids(row.sequence_id))
            for (row, _), outcome in zip(rows, outcomes, strict=True)
            if isinstance(outcome, Tensor)
        ]
        choices = iter(choose(choosing))
        return [next(choices)[0] if isinstance(outcome, Tensor) else outcome for outcome in outcomes]

    def _check(self, row: ProposeRow) -> None:
        if row.draft_count < 1:
            raise InvalidRequest(f"draft_count is {row.draft_count}; ask for at least 1", field="draft_count")
        check_sampling(row.rule.sampling, self.runner.limits.vocabulary_size)
        check_row(row, self.runner.limits, row.base_length + len(row.token_ids) + row.draft_count - 1)


def _cached_length(row: ProposeRow, drafts: Sequence[int]) -> int:
    """Tokens cached once `drafts` are known: the last of them is not."""
    return row.base_length + len(row.token_ids) + len(drafts) - 1
