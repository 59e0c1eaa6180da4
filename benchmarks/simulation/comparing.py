"""Simulations of real runs, and how far they are from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.simulation.measuring import RealCluster, RealRun
from coordinator.simulation.run import simulate
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.load.load import SentRequest
from paceline.measure.load.summary import LoadSummary, Objectives, Percentiles, summarize
from paceline.simulate.cluster import PlannedRequest, SimulatedCluster

LIMITS = {1: (0.05, 0.10, 0.15), 2: (0.10, 0.25, 0.25)}
"""Most that throughput, P50 and P99 of latency may be off, by replicas."""
FIGURES = ("throughput", "P50", "P99")


@dataclass(frozen=True)
class Comparison:
    client_count: int
    real: LoadSummary
    simulated: LoadSummary
    real_records: tuple[SentRequest, ...]
    simulated_records: tuple[SentRequest, ...]
    service_shares: dict[str, float]
    """Share of the time in which each simulated service worked."""

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors of throughput, and of latency's P50 and P99."""
        real, simulated = _of(self.real.latency_s), _of(self.simulated.latency_s)
        pairs = (
            (self.simulated.tokens_per_s, self.real.tokens_per_s),
            (simulated.p50, real.p50),
            (simulated.p99, real.p99),
        )
        return tuple(one / other - 1 for one, other in pairs)


def compare(real: RealCluster, seeds: Sequence[int]) -> list[Comparison]:
    """Simulate each load with each seed, because 40 outputs have luck; compare the run of median throughput."""
    return [_compared(real, run, seeds) for run in real.runs]


def _compared(real: RealCluster, run: RealRun, seeds: Sequence[int]) -> Comparison:
    measured = SimulatedCluster.measured(real.saved)
    cluster = replace(measured, target_count=real.replica_count, client_round_trip_s=run.round_trip_s)
    requests = [PlannedRequest(*lengths) for lengths in zip(run.prompt_counts, run.output_counts, strict=True)]
    results = [simulate(real.saved, cluster, requests, client_count=run.client_count, seed=seed) for seed in seeds]
    result = sorted(results, key=lambda one: one.summary.tokens_per_s)[len(results) // 2]
    summary = summarize(run.records, Objectives())
    shares = {one.name: one.busy_share for one in result.services}
    return Comparison(run.client_count, summary, result.summary, run.records, result.requests, shares)


def table_of(comparisons: Sequence[Comparison], replica_count: int) -> Table:
    table = Table("clients", "", "tokens/s", "P50", "P90", "P99", "first token P50", "P99", "per token P50", "P99")
    for column in table.columns:
        column.justify = "right"
    for one in comparisons:
        for name, summary in (("real", one.real), ("simulated", one.simulated)):
            latency, first, each = map(_of, (summary.latency_s, summary.first_token_s, summary.per_token_s))
            times = [f"{value:.3f} s" for value in (latency.p50, latency.p90, latency.p99)]
            times += [f"{1e3 * value:.1f} ms" for value in (first.p50, first.p99, each.p50, each.p99)]
            table.add_row(str(one.client_count), name, f"{summary.tokens_per_s:.0f}", *times)
        throughput, p50, p99 = (f"{error:+.1%}" for error in one.errors)
        table.add_row("", "holds" if holds(one, replica_count) else "off", throughput, p50, "", p99, end_section=True)
    return table


def holds(one: Comparison, replica_count: int) -> bool:
    return all(abs(error) <= most for error, most in zip(one.errors, LIMITS[replica_count], strict=True))


def _of(percentiles: Percentiles | None) -> Percentiles:
    assert percentiles, "no request was answered"
    return percentiles


def write_plot(path: Path, comparisons: Sequence[Comparison], title: str) -> None:
    """Draw throughput by load, and how latencies are distributed, real and simulated."""
    figure = new_figure(12, 5)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    clients = [one.client_count for one in comparisons]
    left.plot(clients, [one.real.tokens_per_s for one in comparisons], "o-", label="real")
    left.plot(clients, [one.simulated.tokens_per_s for one in comparisons], "x--", label="simulated")
    left.set(xlabel="clients", ylabel="output tokens a second", ylim=(0, None))
    left.legend()
    for number, one in enumerate(comparisons):
        color = f"C{number}"
        right.ecdf([record.latency_s for record in one.real_records], color=color, label=f"{one.client_count} clients")
        right.ecdf([record.latency_s for record in one.simulated_records], color=color, linestyle="--")
    right.set(xlabel="latency in seconds; dashed: simulated", ylabel="share of requests")
    right.legend()
    save_figure(figure, path)
