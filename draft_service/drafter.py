"""The drafter, which proposes draft tokens for a group of sequences, one packed pass a token.

Owns the steps of a proposal; the runner owns the cache. Rows may want different counts: a row that has its drafts
leaves the later passes. If the engine can make all drafts of a row by itself, it is asked to.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.checks import MAX_PROPOSED_COUNT, check_row
from paceline.engine.fixed_shapes.passes import MAX_ROWS
from paceline.engine.placing import PackedRow
from paceline.engine.rules import rule_of
from paceline.engine.runner import Runner
from paceline.engine.sampling import Choice, Choosing, choose
from paceline.errors import InvalidRequest, PacelineError
from paceline.types import Prefilled, Proposal, ProposeRow


class Drafter:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def propose(self, rows: Sequence[ProposeRow], scope: str = "") -> list[Proposal | PacelineError]:
        """Return each row's proposal or error, in the order of `rows`.

        The last draft token is not fed back, so it is not cached: if all are accepted, the next call appends it
        together with the target's next token, and no pass is spent on catching up. A long prompt that was taken in
        part has no drafts yet. Drafts end before a place where no token can be chosen. `scope` sets the caller's
        sequences apart from those of others.
        """
        rows, errors = self.runner.ruled(rows, scope, self._check)
        results: dict[int, Proposal | PacelineError] = dict(errors)
        results |= self._propose_at_once({i: row for i, row in enumerate(rows) if i not in results})
        drafts: dict[int, list[int]] = {index: [] for index in range(len(rows)) if index not in results}
        ended: set[int] = set()
        pending = list(drafts)
        while pending:
            for index, outcome in zip(pending, self._step([(rows[i], drafts[i]) for i in pending]), strict=True):
                if isinstance(outcome, int):
                    drafts[index].append(outcome)
                elif isinstance(outcome, Prefilled):
                    results[index] = Proposal((), outcome.cached_length)
                elif outcome is None:
                    ended.add(index)
                else:
                    results[index] = outcome
            done = results.keys() | ended
            pending = [i for i in pending if i not in done and len(drafts[i]) < rows[i].draft_count]
        return [
            results.get(index) or Proposal(tuple(drafts[index]), _cached_length(row, drafts[index]))
            for index, row in enumerate(rows)
        ]

    def _propose_at_once(self, rows: Mapping[int, ProposeRow]) -> dict[int, Proposal | PacelineError]:
        """Serve the rows whose steps can all run on the device, without the host in between."""
        able = [index for index, row in rows.items() if self.runner.drafts_at_once(row)]
        results: dict[int, Proposal | PacelineError] = {}
        for start in range(0, len(able), MAX_ROWS):
            part = able[start : start + MAX_ROWS]
            outcomes = self.runner.draft([rows[index] for index in part])
            for index, outcome in zip(part, outcomes, strict=True):
                if isinstance(outcome, PacelineError):
                    results[index] = outcome
                else:
                    results[index] = Proposal(tuple(outcome), _cached_length(rows[index], outcome))
        return results

    def _step(self, rows: Sequence[tuple[ProposeRow, list[int]]]) -> list[int | Prefilled | PacelineError | None]:
        """Run one pass: a row's committed tokens at first, then its last draft token. Return the next draft tokens.

        None says that no token can be chosen, so the row's drafts end here.
        """
        outcomes = self.runner.forward(
            [
                PackedRow(row.sequence_id, _cached_length(row, drafts), tuple(drafts[-1:]))
                if drafts
                else PackedRow(row.sequence_id, row.base_length, row.token_ids, following_count=row.following_count)
                for row, drafts in rows
            ]
        )
        choosing = [
            Choosing(outcome, rule_of(row), self.runner.cache.token_ids(row.sequence_id))
            for (row, _), outcome in zip(rows, outcomes, strict=True)
            if isinstance(outcome, Tensor)
        ]
        choices = iter(choose(choosing))
        return [_token(next(choices)[0]) if isinstance(outcome, Tensor) else outcome for outcome in outcomes]

    def _check(self, row: ProposeRow) -> None:
        if not 1 <= row.draft_count <= MAX_PROPOSED_COUNT:
            raise InvalidRequest(
                f"draft_count is {row.draft_count}; ask for 1 to {MAX_PROPOSED_COUNT}", field="draft_count"
            )
        check_row(row, self.runner.limits, row.draft_count - 1)


def _token(choice: Choice) -> int | None:
    return choice if isinstance(choice, int) else None


def _cached_length(row: ProposeRow, drafts: Sequence[int]) -> int:
    """Return the number of cached tokens once `drafts` are known: the last of them is not cached."""
    return row.base_length + len(row.token_ids) + len(drafts) - 1
