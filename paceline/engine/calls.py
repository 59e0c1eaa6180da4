"""Calls that are served together: their rows become one list for the passes, and each call gets its results again.

Knows nothing of queues: who is served together is decided elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.checks import DECODED_TOKENS, MAX_FURTHER_COUNT, MAX_PROPOSED_COUNT
from paceline.errors import PacelineError
from paceline.scope import Caller, RowT
from paceline.types import ProposeRow

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Call(Generic[RowT]):
    rows: Sequence[RowT]
    caller: Caller = Caller()

    @property
    def sequence_ids(self) -> frozenset[str]:
        """Ids of its sequences in the cache."""
        return frozenset(self.caller.scope + row.sequence_id for row in self.rows)

    def token_count(self, chunk_tokens: int) -> int:
        """Return how many tokens the call has computed, at most: `chunk_tokens` of its prompts."""
        counts = [len(row.token_ids) for row in self.rows]
        prompts = sum(count for count in counts if count > DECODED_TOKENS)
        decoded = sum(count for count in counts if count <= DECODED_TOKENS)
        return min(prompts, chunk_tokens) + decoded + sum(map(_draft_count, self.rows))


class RuledCalls(Generic[RowT]):
    """The rows of calls that can run, with the cache's sequence ids and their rules."""

    def __init__(
        self, calls: Sequence[Call[RowT]], rule: Callable[[Call[RowT]], tuple[Sequence[RowT], dict[int, PacelineError]]]
    ) -> None:
        """`rule` returns a call's rows with ids and rules, and by index the errors of those that cannot run."""
        self._row_counts = [len(call.rows) for call in calls]
        self._errors: list[Mapping[int, PacelineError]] = []
        self.rows: list[RowT] = []
        self.names: list[str] = []
        """The rows' sequence ids as their callers know them."""
        for call in calls:
            rows, errors = rule(call)
            self._errors.append(errors)
            self.rows += [row for index, row in enumerate(rows) if index not in errors]
            self.names += [row.sequence_id for index, row in enumerate(call.rows) if index not in errors]

    def results(self, results: Sequence[ResultT]) -> list[list[ResultT | PacelineError]]:
        """Return each call's results and errors in the order of its rows; `results` are those of `rows`."""
        left = iter(results)
        return [
            [errors[index] if index in errors else next(left) for index in range(count)]
            for count, errors in zip(self._row_counts, self._errors, strict=True)
        ]


def _draft_count(row: RowT) -> int:
    """Return the tokens to compute beside the row's own; its counts were not checked yet."""
    if isinstance(row, ProposeRow):
        return max(0, min(row.draft_count, MAX_PROPOSED_COUNT) - 1)
    further_count = max(0, min(row.further_count, MAX_FURTHER_COUNT))
    return len(row.draft_token_ids) + further_count * (1 + max(0, min(row.propose_count, MAX_PROPOSED_COUNT)))
