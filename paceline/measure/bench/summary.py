"""The summary of a bench's runs: the figures that tables print, as numbers, for readers of the JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from paceline.measure.bench import grid
from paceline.measure.bench.result import BenchResult, SystemResult


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
    """Speed-up of our system over each kind of peer, at the same batch size or, if the peer has no other, at 1."""
    speedup_over_own_single: float | None
    """Speed-up over the same system at B = 1."""
    equal_count: int
    """Number of outputs equal to those of the first system of the dtype."""
    rounds: "RoundSummary | None"


@dataclass(frozen=True)
class RoundSummary:
    """Means over all rounds of the runs that count; rounds may overlap."""

    round_ms: float
    floor_ms: float | None
    """Least time to read from memory what a round must read."""
    floor_share: float | None
    """Share of the speed that memory allows: least time for these rounds over the time of their runs."""
    time_shares: dict[str, float]
    acceptance: float | None
    tokens_per_row: float
    """SpecBench's mean accepted tokens (MAT)."""
    occupancy: float


def summaries(result: BenchResult) -> list[Summary]:
    peers = peers_of(result)
    return [_summary(result, system, peers) for system in result.measured]


def peers_of(result: BenchResult) -> list[str]:
    """Return the kinds of peers that were measured."""
    return [kind for kind in grid.PEERS if any(one.spec.kind == kind for one in result.measured)]


def to_json(result: BenchResult) -> str:
    """Write the result with its summaries; `bench_result_from_json` reads it back."""
    raw = TypeAdapter(BenchResult).dump_python(result, mode="json")
    figures = TypeAdapter(list[Summary]).dump_python(summaries(result), mode="json")
    return json.dumps({"summaries": figures} | raw, indent=1, ensure_ascii=False)


def _summary(result: BenchResult, system: SystemResult, peers: Sequence[str]) -> Summary:
    rate, spec = system.tokens_per_s, system.spec
    beside = {kind: result.find(kind, spec) for kind in peers} if spec.is_ours else {}
    single = result.own_single(spec) if spec.batch_size > 1 else None
    return Summary(
        spec.label,
        spec.batch_size,
        rate,
        system.quiet_count,
        len(system.runs),
        system.threads,
        {kind: rate / peer.tokens_per_s for kind, peer in beside.items() if peer},
        rate / single.tokens_per_s if single else None,
        result.prompt_count - system.mismatch_count,
        _round_summary(result, system),
    )


def _round_summary(result: BenchResult, system: SystemResult) -> RoundSummary | None:
    rounds = system.rounds
    if rounds is None:
        return None
    floor_s = result.floor_s(system)
    return RoundSummary(
        1e3 * sum(rounds.seconds.values()) / rounds.round_count,
        None if floor_s is None else 1e3 * floor_s / rounds.round_count,
        None if floor_s is None else floor_s / system.elapsed_s,
        rounds.time_shares,
        rounds.acceptance,
        rounds.tokens_per_row,
        rounds.occupancy,
    )
