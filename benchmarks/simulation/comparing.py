"""Simulations of real runs, and how far they are from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean

from rich.table import Table

from benchmarks.simulation.measuring import RealCluster, RealRun
from coordinator.simulation.run import simulate
from paceline.measure.figures import new_figure, save_figure
from paceline.measure.load.load import SentRequest
from paceline.measure.load.summary import LoadSummary, Objectives, Percentiles, summarize
from paceline.simulate.cluster import PlannedRequest, SimulatedCluster
from paceline.simulate.saved_costs import SavedCosts

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


def compare(real: RealCluster, seeds: Sequence[int], *, own_costs: bool = False) -> list[Comparison]:
    """Simulate each load with each seed, because so few outputs have luck; compare the run of median throughput.

    `own_costs` takes the costs of the timed calls, so that only the simulator can be wrong.
    """
    saved = real.compared if own_costs else real.saved
    cluster = replace(SimulatedCluster.measured(saved), target_count=real.replica_count)
    loads = groupby(real.runs, key=lambda one: one.client_count)
    return [_compared(saved, cluster, client_count, [*turns], seeds) for client_count, turns in loads]


def _compared(
    saved: SavedCosts, cluster: SimulatedCluster, client_count: int, turns: Sequence[RealRun], seeds: Sequence[int]
) -> Comparison:
    found = [_simulated(saved, cluster, turns, seed * len(turns)) for seed in seeds]
    records, shares = sorted(found, key=lambda one: summarize(one[0], Objectives()).tokens_per_s)[len(found) // 2]
    real = _one_after_the_other([turn.records for turn in turns])
    return Comparison(
        client_count, summarize(real, Objectives()), summarize(records, Objectives()), real, records, shares
    )


def _simulated(
    saved: SavedCosts, cluster: SimulatedCluster, turns: Sequence[RealRun], first_seed: int
) -> tuple[tuple[SentRequest, ...], dict[str, float]]:
    """Return the records of all turns, and the share of the time in which each service worked."""
    results = []
    for seed, turn in enumerate(turns, first_seed):
        requests = [PlannedRequest(*lengths) for lengths in zip(turn.prompt_counts, turn.output_counts, strict=True)]
        own = replace(cluster, client_round_trip_s=turn.round_trip_s)
        results.append(simulate(saved, own, requests, client_count=turn.client_count, seed=seed))
    shares = {
        services[0].name: mean(one.busy_share for one in services)
        for services in zip(*(one.services for one in results), strict=True)
    }
    return _one_after_the_other([one.requests for one in results]), shares


def _one_after_the_other(turns: Sequence[Sequence[SentRequest]]) -> tuple[SentRequest, ...]:
    """Return the records of all turns as those of one run, without the time between them."""
    records: list[SentRequest] = []
    for turn in turns:
        began_s = max((one.ended_s for one in records), default=0.0)
        records += [_later(one, began_s) for one in turn]
    return tuple(records)


def _later(record: SentRequest, by_s: float) -> SentRequest:
    planned_s, sent_s, ended_s = (by_s + one for one in (record.planned_s, record.sent_s, record.ended_s))
    token_times = tuple((by_s + at_s, count) for at_s, count in record.token_times)
    return replace(record, planned_s=planned_s, sent_s=sent_s, ended_s=ended_s, token_times=token_times)


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
