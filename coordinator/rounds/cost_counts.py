"""Sums of what calls cost and of how often drafts were right, since the start, for those who plan other clusters.

Knows nothing of what `auto` decides. A planner's prices are of whole rounds, where what one lane does hides behind
another; here each call stands alone, beside how many rounds were in flight, because services that share cores slow
each other down.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from coordinator.requests.acceptance import by_place
from coordinator.requests.generation import Generation
from coordinator.rounds.counted_models import CountedModels
from coordinator.rounds.round_report import RoundReport, RowReport
from paceline.types import AcceptanceCounts, CallCosts, DraftSource, HopTime, MeasuredCosts


class _Size(NamedTuple):
    """The calls that are summed together. Prompts are told apart by their bits alone, for they have any length."""

    draft_model: str
    round_count_at_once: int
    row_count: int
    step_count: int
    prompt_bits: int


class CostCounts:
    """Of draft models that are not counted by their names it keeps nothing: a mean of several is no one's cost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._in_flight_count = 0
        self._calls: dict[_Size, CallCosts] = {}
        self._acceptances: dict[tuple[DraftSource, str], _Acceptance] = {}
        self._models = CountedModels(self._forget, clock)

    @property
    def in_flight_count(self) -> int:
        return self._in_flight_count

    @contextmanager
    def in_flight(self) -> Iterator[int]:
        """Count a round in flight while the block runs; yield how many are, with it."""
        self._in_flight_count += 1
        try:
            yield self._in_flight_count
        finally:
            self._in_flight_count -= 1

    def add(self, report: RoundReport, round_count_at_once: int, round_s: float) -> None:
        """Count a round that took `round_s` with all that its rows waited for."""
        is_empty = not report.rows and not report.prompt_token_count
        # Hops of another round say nothing of what its rows cost.
        is_prepared = any(one.prepared_wait_s is not None for one in report.draft_calls.values())
        if not (is_empty or report.draft_error or is_prepared):
            self._add_calls(report, round_count_at_once, round_s)
            for row in report.all_rows:
                self._add_row(row)
        for row in report.all_rows:
            if row.is_last and row.generation:
                self._end(row.generation)

    def _add_calls(self, report: RoundReport, round_count_at_once: int, round_s: float) -> None:
        for model, hop in report.draft_times.items():
            if not self._models.counts(model):
                continue
            call = report.draft_calls[model]
            bits = call.caught_up_count.bit_length()
            size = _Size(model, round_count_at_once, call.row_count, call.step_count, bits)
            self._add_call(size, hop, call.token_count, call.caught_up_count)
        drafted_counts = [row.drafted_count for row in report.rows]
        prompt_count = report.prompt_token_count
        most = max(drafted_counts, default=0)
        size = _Size("", round_count_at_once, len(report.rows), most, prompt_count.bit_length())
        own_s = max(0.0, round_s - report.propose.total_s - report.verify.total_s)
        # Of a call with further rounds each took about the same; the way is the call's.
        hop = report.verify
        verify = HopTime(hop.wire_s, hop.queued_s, hop.executed_s / report.pass_count)
        self._add_call(size, verify, sum(drafted_counts), prompt_count, own_s)

    def _add_call(self, size: _Size, hop: HopTime, drafted_count: int, prompt_count: int, own_s: float = 0.0) -> None:
        before = self._calls.get(size) or CallCosts(*size[:-1])
        self._calls[size] = CallCosts(
            *size[:-1],
            before.call_count + 1,
            before.drafted_count + drafted_count,
            before.prompt_count + prompt_count,
            before.executed_s + hop.executed_s,
            before.executed_squares + hop.executed_s**2,
            before.wire_s + hop.wire_s,
            before.own_s + own_s,
            before.wire_squares + hop.wire_s**2,
        )

    def _add_row(self, row: RowReport) -> None:
        if row.source and row.drafted_count:
            kind = (row.source, row.draft_model)
            if kind not in self._acceptances:
                if not self._models.counts(row.draft_model):
                    return
                self._acceptances[kind] = _Acceptance()
            self._acceptances[kind].add(row)

    def _forget(self, model: str) -> None:
        self._calls = {size: one for size, one in self._calls.items() if size.draft_model != model}
        self._acceptances.pop((DraftSource.DRAFT, model), None)

    def _end(self, generation: Generation) -> None:
        """Count an output that has ended, of each source that drafted for it: its last round may have had no drafts."""
        for one in self._acceptances.values():
            one.outputs.end(generation)

    def snapshot(self) -> MeasuredCosts:
        return MeasuredCosts(
            tuple(self._calls[size] for size in sorted(self._calls)),
            tuple(one.counts(*kind) for kind, one in sorted(self._acceptances.items())),
        )


@dataclass
class _Acceptance:
    """Counts of one source."""

    compared: Counter[int] = field(default_factory=Counter)
    """Rows by their count of compared drafts."""
    right: Counter[int] = field(default_factory=Counter)
    """Rows by their count of right drafts."""
    outputs: "_Outputs" = field(default_factory=lambda: _Outputs())

    def add(self, row: RowReport) -> None:
        compared_count = min(row.accepted_count + 1, row.drafted_count)
        self.compared[compared_count] += 1
        self.right[row.accepted_count] += 1
        if row.generation:
            self.outputs.add(row.generation, row.accepted_count, compared_count)

    def counts(self, source: DraftSource, draft_model: str) -> AcceptanceCounts:
        places = range(1, 1 + max(self.compared))
        compared, right = (by_place([rows[place] for place in places]) for rows in (self.compared, self.right))
        return AcceptanceCounts(source, draft_model, compared, right, self.outputs.deviation)


class _Outputs:
    """How much outputs differ: the drafts of one text are right more often than those of another."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, float] = dict.fromkeys(("right", "compared", "compared squares", "right squares"), 0.0)

    def add(self, generation: Generation, right_count: int, compared_count: int) -> None:
        right, compared = generation.compared_counts.get(self, (0, 0))
        generation.compared_counts[self] = right + right_count, compared + compared_count

    def end(self, generation: Generation) -> None:
        right, compared = generation.compared_counts.pop(self, (0, 0))
        if compared:
            self._count += 1
            self._add({"right": right, "compared": compared})
            self._add({"compared squares": compared**2, "right squares": right**2 / compared})

    def _add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._sums[name] += value

    @property
    def deviation(self) -> float:
        """The square root of the variance between outputs that an analysis of variance leaves beside luck."""
        right, compared, compared_squares, right_squares = self._sums.values()
        weight = compared - compared_squares / compared if compared else 0.0
        if weight <= 0:
            return 0.0  # fewer than two outputs
        rate = right / compared
        by_luck = (self._count - 1) * rate * (1 - rate)
        return sqrt(max(0.0, right_squares - right**2 / compared - by_luck) / weight)
