"""`paceline simulate`: what a cluster would do, by costs that another measured."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from paceline.checks import MOST_LANES
from paceline.cli.connection import Connection, connected
from paceline.cli.consoles import words_console
from paceline.cli.load_view import summary_lines, summary_table
from paceline.cli.options import draft_limit, run_async, with_flags
from paceline.errors import InvalidRequest
from paceline.files import check_all_distinct, replace_file
from paceline.process.cluster_plan import ClusterOptions
from paceline.simulate.cluster import (
    LONGEST_S,
    Lengths,
    PlannedRequest,
    SimulatedCluster,
    first_requests,
    poisson_requests,
    read_trace,
)
from paceline.simulate.result import SimulationResult
from paceline.simulate.saved_costs import SavedCosts, read_costs, write_costs

DEFAULT_REQUESTS = 200
LONGEST_TRIP_MS = 60_000.0


@dataclass(frozen=True)
class WorkloadFlags:
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with arrival_s, prompt_tokens and max_tokens: the requests.")
    ] = None
    rate: Annotated[float | None, typer.Option(help="Requests a second instead, on average.")] = None
    clients: Annotated[
        int | None, typer.Option(min=1, help="Clients instead, each of which asks again when it was answered.")
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="Requests to send, with --rate or --clients.")] = DEFAULT_REQUESTS
    prompt_tokens: Annotated[str, typer.Option(help="Length of prompts, or a range as 64:256.")] = "64"
    max_tokens: Annotated[str, typer.Option(help="Length of outputs, or a range.")] = "128"
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and luck.")] = 0

    def planned(self) -> list[PlannedRequest]:
        """Raise InvalidRequest unless the flags name one workload."""
        given = [name for name in ("trace", "rate", "clients") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(f"--{name}" for name in given) or "no workload"
            raise InvalidRequest(f"{named} given; give one of --trace, --rate and --clients")
        if self.trace:
            return read_trace(self.trace)
        lengths = Lengths.of(self.prompt_tokens), Lengths.of(self.max_tokens)
        if self.rate is None:
            return first_requests(*lengths, self.seed, self.requests)
        if not self.requests / LONGEST_S <= self.rate < float("inf"):
            raise InvalidRequest(
                f"--rate is {self.rate}; give requests a second, so many that {self.requests} come in {LONGEST_S:.0f} s"
            )
        return poisson_requests(self.rate, *lengths, self.seed, self.requests)


@dataclass(frozen=True)
class SimulatedFlags:
    batch_size: Annotated[int | None, typer.Option(min=1, help="Most generations in a round. Unset: as measured.")] = (
        None
    )
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_LANES,
            help="Groups in flight at once. Unset: as measured, and as the coordinator chooses where that is 2.",
        ),
    ] = None
    draft_count: Annotated[
        str | None, typer.Option(help="Draft tokens of a generation and round, or auto. Unset: as measured.")
    ] = None
    coordinators: Annotated[int, typer.Option(min=1, help="Coordinators; clients take turns among them.")] = 1
    targets: Annotated[int, typer.Option(min=1, help="Replicas of the target service.")] = 1
    drafts: Annotated[int | None, typer.Option(min=0, help="Replicas of the draft service. Unset: as measured.")] = None
    client_round_trip_ms: Annotated[
        float, typer.Option(min=0, max=LONGEST_TRIP_MS, help="From clients to coordinators and back.")
    ] = 0.0
    draft_round_trip_ms: Annotated[
        float,
        typer.Option(
            min=0, max=LONGEST_TRIP_MS, help="From coordinators to the draft and back, beside what was measured."
        ),
    ] = 0.0
    target_round_trip_ms: Annotated[
        float, typer.Option(min=0, max=LONGEST_TRIP_MS, help="The same, to the target.")
    ] = 0.0
    target_stages: Annotated[
        int, typer.Option(min=1, help="Devices that each hold as many of a target's layers, as --pipeline-parallel.")
    ] = 1
    apart: Annotated[
        bool,
        typer.Option("--apart", help="Each service has a machine of its own: none slows another down."),
    ] = False

    def cluster(self, saved: SavedCosts) -> SimulatedCluster:
        measured = SimulatedCluster.measured(saved)
        wanted = draft_limit(True, ClusterOptions(draft_count=self.draft_count))
        asked_count: int | Literal["auto"] = "auto" if wanted is None else wanted
        return SimulatedCluster(
            self.batch_size or measured.batch_size,
            self.lanes or measured.lane_count,
            measured.draft_count if self.draft_count is None else asked_count,
            self.coordinators,
            self.targets,
            measured.draft_service_count if self.drafts is None else self.drafts,
            self.client_round_trip_ms / 1e3,
            self.draft_round_trip_ms / 1e3,
            self.target_round_trip_ms / 1e3,
            self.target_stages,
            self.apart,
        )


@with_flags("connection", Connection, Connection)
@with_flags("workload", WorkloadFlags, WorkloadFlags)
@with_flags("simulated", SimulatedFlags, SimulatedFlags)
def command(
    costs: Annotated[
        Path | None, typer.Option(help="Costs that --save-costs wrote; otherwise --address says who is asked.")
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write the costs here; without a workload that is all that is done.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    *,
    connection: Connection,
    workload: WorkloadFlags,
    simulated: SimulatedFlags,
) -> None:
    """Simulate a cluster by the costs that another one measured."""
    console = words_console()
    written = (save_costs, "--save-costs"), (output, "--output")
    check_all_distinct((costs, "--costs"), written[1])  # costs may be saved where they were
    check_all_distinct((workload.trace, "--trace"), *written)
    saved = _costs(costs, connection)
    if save_costs:
        write_costs(save_costs, saved)
        console.print(f"costs written to {save_costs}", style="dim", soft_wrap=True)
        if workload == WorkloadFlags():
            return
    cluster, requests = simulated.cluster(saved), workload.planned()
    # Imported by name, because shared code must not import a service.
    simulate = import_module("coordinator.simulation.run").simulate
    result: SimulationResult = simulate(saved, cluster, requests, client_count=workload.clients, seed=workload.seed)
    _show(console, saved, cluster, result)
    if (counts := saved.draft_counts) and len(counts) < 2 and cluster.draft_count not in (0, *counts):
        console.print(
            f"the costs are of {counts[0]} drafts a round alone, so what other counts cost is a guess; measure them "
            "with --draft-count auto",
            style="yellow",
            soft_wrap=True,
        )
    if output:
        replace_file(output, json.dumps(_content(saved, cluster, result), indent=2) + "\n")
        console.print(f"written to {output}", style="dim", soft_wrap=True)


def _costs(path: Path | None, connection: Connection) -> SavedCosts:
    if (path is None) == (connection.address is None):
        raise InvalidRequest("give --costs FILE, or the --address of a coordinator that measured them")
    return read_costs(path) if path else run_async(_asked(connection))


async def _asked(connection: Connection) -> SavedCosts:
    async with connected(connection, ClusterOptions()) as (client, _):
        return SavedCosts.of(await client.describe(include_costs=True))


def _show(console: Console, saved: SavedCosts, cluster: SimulatedCluster, result: SimulationResult) -> None:
    title = f"simulated: {saved.target.model_id}, B = {cluster.batch_size}, draft count {cluster.draft_count}"
    console.print(summary_table(title, result.summary))
    for line in summary_lines(result.summary):
        console.print(line, soft_wrap=True)
    console.print(f"{result.round_count} rounds of {result.mean_group_size:.2f} generations")
    console.print(_service_table(result))


def _service_table(result: SimulationResult) -> Table:
    table = Table("service", "calls", "busy", "mean wait", "most tokens cached", "their bytes")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in result.services:
        cells = (f"{one.busy_share:.0%}", f"{1e3 * one.queued_s:.1f} ms", str(one.peak_tokens))
        table.add_row(one.name, str(one.call_count), *cells, f"{one.peak_bytes / 2**20:.1f} MiB")
    return table


def _content(saved: SavedCosts, cluster: SimulatedCluster, result: SimulationResult) -> dict[str, Any]:
    models = {"target": saved.target.model_id, "draft": saved.draft.model_id if saved.draft else None}
    counts = {"round_count": result.round_count, "mean_group_size": result.mean_group_size}
    services: Sequence[dict[str, Any]] = [asdict(one) for one in result.services]
    settings = {**models, **asdict(cluster)}
    return {"settings": settings, "summary": asdict(result.summary), **counts, "services": services}
