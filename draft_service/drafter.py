"""Propose draft tokens for a group of sequences, one packed pass a token.

Owns the steps of a proposal; the runner owns the cache. Rows may want different counts: a row that has its drafts
leaves the later passes.
"""

from collections.abc import Sequence

from paceline.checks import check_row, row_errors
from paceline.engine.runner import PackedRow, Runner
from paceline.engine.sampling import choose
from paceline.errors import InvalidRequest, PacelineError
from paceline.types import Proposal, ProposeRow


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def propose(self, rows: Sequence[ProposeRow]) -> list[Proposal | PacelineError]:
        """Return each row's proposal, or why it has none, in the order of `rows`.

        The last draft token is not fed back, so it is not cached: if all are accepted, the next call appends it
        together with the target's next token, and no pass is spent on catching up.
        """
        failed = row_errors(rows, self._check)
        drafts: dict[int, list[int]] = {index: [] for index in range(len(rows)) if index not in failed}
        pending = list(drafts)
        while pending:
            for index, outcome in zip(pending, self._step([(rows[i], drafts[i]) for i in pending]), strict=True):
                if isinstance(outcome, PacelineError):
                    failed[index] = outcome
                else:
                    drafts[index].append(outcome)
            pending = [i for i in pending if i not in failed and len(drafts[i]) < rows[i].draft_count]
        return [failed.get(index) or self._proposal(row, drafts[index]) for index, row in enumerate(rows)]

    def _step(self, rows: Sequence[tuple[ProposeRow, list[int]]]) -> list[int | PacelineError]:
        """Run one pass: a row's committed tokens at first, then its last draft token. Return the next draft tokens."""
        outcomes = self.runner.forward(
            [
                PackedRow(row.sequence_id, self._cached_length(row, drafts), tuple(drafts[-1:]))
                if drafts
                else PackedRow(row.sequence_id, row.base_length, row.token_ids)
                for row, drafts in rows
            ]
        )
        logits = [outcome for outcome in outcomes if not isinstance(outcome, PacelineError)]
        choices = iter(choose(logits))
        return [outcome if isinstance(outcome, PacelineError) else next(choices)[0] for outcome in outcomes]

    def _proposal(self, row: ProposeRow, drafts: list[int]) -> Proposal:
        return Proposal(tuple(drafts), self._cached_length(row, drafts))

    def _cached_length(self, row: ProposeRow, drafts: list[int]) -> int:
        """Tokens cached once `drafts` are known: the last of them is not."""
        return row.base_length + len(row.token_ids) + len(drafts) - 1

    def _check(self, row: ProposeRow) -> None:
        if row.draft_count < 1:
            raise InvalidRequest(f"draft_count is {row.draft_count}; ask for at least 1", field="draft_count")
        final_length = row.base_length + len(row.token_ids) + row.draft_count - 1
        check_row(row, self.runner.model.description, final_length)
