"""The choice rule of each sequence: sent with its first row, checked once, kept until the sequence is released.

A sequence without a rule is not decoded: a guessed rule would give output that nobody asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.checks import check_rule, row_errors
from paceline.errors import PacelineError, RuleUnknown, as_result
from paceline.scope import RowT, scoped
from paceline.types import ChoiceRule, ProposeRow, ResponseFormat, VerifyRow


class SequenceRules:
    def __init__(
        self,
        vocabulary_size: int,
        check_prefix: Callable[[ProposeRow | VerifyRow], None],
        check_format: Callable[[ResponseFormat], None],
    ) -> None:
        """`check_prefix` raises for a row that relies on tokens that are not cached; `check_format` raises too."""
        self._vocabulary_size = vocabulary_size
        self._check_prefix = check_prefix
        self._check_format = check_format
        self._rules: dict[str, ChoiceRule] = {}

    def ruled(
        self, rows: Sequence[RowT], scope: str, check: Callable[[RowT], None]
    ) -> tuple[list[RowT], dict[int, PacelineError]]:
        """Return the rows with the cache's sequence ids and their rules, and by index the errors of rows that fail.

        A row fails if `check` refuses it, if it repeats a sequence, or if its prefix or its rule is unknown.
        """
        errors = row_errors(rows, check)
        named = list(scoped(rows, scope))
        for index, row in enumerate(named):
            if index not in errors:
                try:
                    # The prefix comes before the rule: for a sequence that is gone, its error says more.
                    self._check_prefix(row)
                    named[index] = replace(row, rule=self._rule(row))
                except PacelineError as error:
                    errors[index] = as_result(error)
        return named, errors

    def forget(self, sequence_id: str) -> None:
        self._rules.pop(sequence_id, None)

    def _rule(self, row: RowT) -> ChoiceRule:
        known = self._rules.get(row.sequence_id)
        if row.rule is None:
            if known is None:
                raise RuleUnknown(
                    f"how tokens of sequence {row.sequence_id!r} are chosen was not told, or is lost; send it whole, "
                    "with sequence_rule, which is empty for greedy decoding"
                )
            return known
        if row.rule != known:
            check_rule(row.rule, self._vocabulary_size)
            if row.rule.response_format:
                self._check_format(row.rule.response_format)
            self._rules[row.sequence_id] = row.rule
        return row.rule


def rule_of(row: ProposeRow | VerifyRow) -> ChoiceRule:
    """Return the rule of a row that has one."""
    assert row.rule is not None
    return row.rule
