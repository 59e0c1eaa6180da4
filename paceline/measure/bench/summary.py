"""The summary of a bench's runs: the figures that tables print, as numbers, for readers of the JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from paceline.measure.bench import grid
from paceline.measure.bench.result import BenchResult, SystemResult
from paceline.measure.rounds import RowUse


@dataclass(frozen=True)
class Summary:
    """Figures of one system at one batch size; None for a figure that does not apply."""

    system: str
    batch_size: int
    tokens_per_s: float
    """Median of the quiet runs, or of all runs if none was quiet."""
    quiet_count: int
    run_count: int
    threads: int | None
    """Number of threads that a peer was fastest with."""
    speedups: dict[str, float]
    """Speed-up of our system over plain decoding and each kind of peer, at the same batch size or, without it, at 1."""
    speedup_over_own_single: float | None
    """Speed-up over the same system at B = 1."""
    decoding_tokens_per_s: float | None
    """Speed with the prompts' time taken out, by `SystemResult.decoding_tokens_per_s`."""
    decoding_speedup: float | None
    """Its ratio to plain decoding's."""
    equal_count: int
    """Number of outputs equal to those of the first system of the dtype."""
    rounds: "RoundSummary | None"


@dataclass(frozen=True)
class SourceSummary:
    """Draft tokens of one source."""

    name: str
    """The source, with its model if it has one."""
    drafted_count: int
    accepted_count: int
    output_share: float
    """Share of all output tokens that were its accepted drafts."""


@dataclass(frozen=True)
class RowSummary:
    acceptance: float | None
    tokens_per_row: float
    """SpecBench's mean accepted tokens (MAT)."""
    sources: tuple[SourceSummary, ...]


@dataclass(frozen=True)
class CategorySummary:
    """Figures of one of our speculative systems over the prompts of a category."""

    category: str
    prompt_count: int
    system: str
    batch_size: int
    rows: RowSummary
    """Of the category's own runs if there are any, else of its rows in the runs of all prompts."""
    alone: Summary | None
    """Figures of the category's own runs; rounds that other categories share tell no speed of one."""


@dataclass(frozen=True)
class RoundSummary(RowSummary):
    """Means over all rounds of the runs that count; rounds may overlap."""

    round_ms: float
    floor_ms: float | None
    """Least time to read from memory what a round must read."""
    floor_share: float | None
    """Share of the speed that memory allows: least time for these rounds over the time of their runs."""
    time_shares: dict[str, float]
    occupancy: float


def summaries(result: BenchResult) -> list[Summary]:
    compared = compared_kinds(result)
    return [_summary(result, system, compared) for system in result.measured]


def compared_kinds(result: BenchResult) -> list[str]:
    """Return the measured kinds that our systems are compared with."""
    return [kind for kind in grid.COMPARED if any(one.spec.kind == kind for one in result.measured)]


def category_summaries(result: BenchResult) -> list[CategorySummary]:
    """Return the figures by category; none where all prompts are of one."""
    if len(result.categories) < 2:
        return []
    found = (
        _category_summary(result, system, category)
        for category in result.categories
        for system in result.measured
        if system.spec.kind == grid.SPECULATIVE
    )
    return [one for one in found if one]


def to_json(result: BenchResult) -> str:
    """Write the result with its summaries; `bench_result_from_json` reads it back."""
    raw = TypeAdapter(BenchResult).dump_python(result, mode="json")
    figures = TypeAdapter(list[Summary]).dump_python(summaries(result), mode="json")
    categories = TypeAdapter(list[CategorySummary]).dump_python(category_summaries(result), mode="json")
    return json.dumps({"summaries": figures, "category_summaries": categories} | raw, indent=1, ensure_ascii=False)


def _summary(result: BenchResult, system: SystemResult, compared: Sequence[str]) -> Summary:
    rate, spec = system.tokens_per_s, system.spec
    beside = {kind: result.find(kind, spec) for kind in compared if kind != spec.kind} if spec.is_ours else {}
    single = result.own_single(spec) if spec.batch_size > 1 else None
    decoding, plain = _decoding(result, system), _decoding(result, beside.get(grid.PLAIN))
    return Summary(
        spec.label,
        spec.batch_size,
        rate,
        system.quiet_count,
        len(system.runs),
        system.threads,
        {kind: rate / peer.tokens_per_s for kind, peer in beside.items() if peer},
        rate / single.tokens_per_s if single else None,
        decoding,
        decoding / plain if decoding and plain else None,
        result.prompt_count - system.mismatch_count,
        _round_summary(result, system),
    )


def _decoding(result: BenchResult, system: SystemResult | None) -> float | None:
    return system.decoding_tokens_per_s(result.prompt_count) if system else None


def _round_summary(result: BenchResult, system: SystemResult) -> RoundSummary | None:
    rounds = system.rounds
    if rounds is None:
        return None
    floor_s = result.floor_s(system)
    return RoundSummary(
        **vars(_row_summary(rounds)),
        round_ms=1e3 * sum(rounds.seconds.values()) / rounds.round_count,
        floor_ms=None if floor_s is None else 1e3 * floor_s / rounds.round_count,
        floor_share=None if floor_s is None else floor_s / system.elapsed_s,
        time_shares=rounds.time_shares,
        occupancy=rounds.occupancy,
    )


def _row_summary(rows: RowUse) -> RowSummary:
    sources = (
        SourceSummary(one.name, one.drafted_count, one.accepted_count, one.accepted_count / rows.committed_count)
        for one in rows.sources
    )
    return RowSummary(rows.acceptance, rows.tokens_per_row, tuple(sources))


def _category_summary(result: BenchResult, system: SystemResult, category: str) -> CategorySummary | None:
    """Return None for a system that has told nothing of the category."""
    own = result.of_category(category)
    alone = next((one for one in own.measured if one.spec == system.spec), None)
    rows = (alone or system).rows_of(category)
    if rows is None:
        return None
    summary = _summary(own, alone, compared_kinds(own)) if alone else None
    spec = system.spec
    return CategorySummary(category, own.prompt_count, spec.label, spec.batch_size, _row_summary(rows), summary)
