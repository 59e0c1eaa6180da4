"""Verify the draft tokens of a group in one packed pass.

At every position the target has one choice. Draft tokens are accepted while they equal it; then the target's choice is
the next token. With no draft tokens this is prefill and plain decoding. The speculative rule is that of Leviathan et
al. (arXiv 2211.17192) for greedy decoding, which keeps the target's output for any draft.
"""

from collections.abc import Sequence

from paceline.checks import check_row, check_token_ids, row_errors
from paceline.engine.runner import PackedRow, Runner
from paceline.engine.sampling import choose
from paceline.errors import PacelineError
from paceline.types import Verdict, VerifyRow


class Verifier:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict | PacelineError]:
        """Return each row's verdict, or why it has none, in the order of `rows`.

        Rejected draft tokens leave the cache by a change of length; full acceptance of k drafts yields k + 1 tokens.
        """
        failed = row_errors(rows, self._check)
        live = [index for index in range(len(rows)) if index not in failed]
        outcomes = dict(zip(live, self.runner.forward([self._packed(rows[i]) for i in live]), strict=True))
        logits = {i: outcome for i, outcome in outcomes.items() if not isinstance(outcome, PacelineError)}
        choices = dict(zip(logits, choose(list(logits.values())), strict=True))
        failed |= {i: outcome for i, outcome in outcomes.items() if isinstance(outcome, PacelineError)}
        return [failed.get(index) or self._settle(row, choices[index]) for index, row in enumerate(rows)]

    def _packed(self, row: VerifyRow) -> PackedRow:
        return PackedRow(
            row.sequence_id,
            row.base_length,
            row.token_ids + row.draft_token_ids,
            logit_count=len(row.draft_token_ids) + 1,
        )

    def _settle(self, row: VerifyRow, choices: Sequence[int]) -> Verdict:
        """Keep the accepted part of the cache; `choices` follow the last committed token and each draft token."""
        accepted = accepted_count(row.draft_token_ids, choices)
        cached_length = row.base_length + len(row.token_ids) + accepted
        self.runner.pool.truncate(row.sequence_id, cached_length)
        return Verdict(accepted, choices[accepted], cached_length)

    def _check(self, row: VerifyRow) -> None:
        model = self.runner.model.description
        check_token_ids(row.draft_token_ids, model.vocabulary_size, "draft_token_ids")
        check_row(row, model, row.base_length + len(row.token_ids) + len(row.draft_token_ids))


def accepted_count(draft_token_ids: Sequence[int], choices: Sequence[int]) -> int:
    """Count the leading draft tokens that equal the target's choices; `choices` has one more than the drafts."""
    for position, (drafted, chosen) in enumerate(zip(draft_token_ids, choices, strict=False)):
        if drafted != chosen:
            return position
    return len(draft_token_ids)
