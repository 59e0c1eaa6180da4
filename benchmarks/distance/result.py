"""What is known of services at a distance, as values that go to JSON, and the figures that follow from them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pydantic import TypeAdapter

from paceline.measure.contention import Contention, counting, median_ratio, was_quiet
from paceline.measure.rounds import RoundUse
from paceline.process.variables import NO_HEADS

FarService = Literal["draft", "target"]


@dataclass(frozen=True)
class Case:
    far: FarService
    """The service that is far from the coordinator; the other one is near."""
    round_trip_ms: float
    batch_size: int
    temperature: float


@dataclass(frozen=True)
class Run:
    """One timed pass over all prompts."""

    elapsed_s: float
    output_count: int
    rounds: RoundUse
    prepared_row_count: int
    """Rows that had their drafts without waiting for a call."""
    equal_count: int
    """Outputs equal to those of the target alone."""
    contention: Contention | None

    @property
    def tokens_per_s(self) -> float:
        return self.output_count / self.elapsed_s


@dataclass(frozen=True)
class Figures:
    """Of the runs that count: the median speed, and means over all rounds and rows."""

    tokens_per_s: float
    round_ms: float
    """Rounds of two lanes overlap."""
    prepared_share: float
    accepted_per_row: float


@dataclass(frozen=True)
class Comparison:
    """One case without prepared rounds and with them, run in turn."""

    case: Case
    prompt_count: int
    without: tuple[Run, ...]
    prepared: tuple[Run, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.without + self.prepared

    @property
    def ratio(self) -> float:
        """Speed with prepared rounds over speed without: the median over neighbouring runs."""
        return median_ratio(self.prepared, self.without)

    @property
    def equal_count(self) -> int:
        """Least outputs of any run that equal those of the target alone: a disturbance must not change outputs."""
        return min(run.equal_count for run in self.runs)

    @property
    def is_equal(self) -> bool:
        return self.equal_count == self.prompt_count

    @property
    def quiet_count(self) -> int:
        return sum(map(was_quiet, self.runs))


@dataclass(frozen=True)
class DistanceResult:
    target_model: str
    draft_model: str
    heads: str
    input_file: str
    max_new_tokens: int
    run_count: int
    machine: str
    started_at: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    comparisons: tuple[Comparison, ...] = ()

    @property
    def models(self) -> str:
        heads = "" if self.heads == NO_HEADS else f" and heads {self.heads}"
        return f"{self.target_model} with {self.draft_model}{heads}"

    @property
    def is_equal(self) -> bool:
        return all(one.is_equal for one in self.comparisons)


@dataclass(frozen=True)
class _Summary:
    """The figures that tables print, as numbers."""

    case: Case
    without: Figures
    prepared: Figures
    ratio: float
    is_equal: bool


def figures_of(runs: Sequence[Run]) -> Figures:
    counted = counting(runs)
    rounds = sum((run.rounds for run in counted), RoundUse())
    return Figures(
        median(run.tokens_per_s for run in counted),
        1e3 * sum(rounds.seconds.values()) / rounds.round_count,
        sum(run.prepared_row_count for run in counted) / rounds.verified_row_count,
        rounds.accepted_count / rounds.verified_row_count,
    )


def to_json(result: DistanceResult) -> str:
    summaries = [
        _Summary(one.case, figures_of(one.without), figures_of(one.prepared), one.ratio, one.is_equal)
        for one in result.comparisons
    ]
    figures = TypeAdapter(list[_Summary]).dump_python(summaries, mode="json")
    raw = TypeAdapter(DistanceResult).dump_python(result, mode="json")
    return json.dumps({"summaries": figures} | raw, indent=1, ensure_ascii=False)
