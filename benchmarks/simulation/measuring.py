"""The real runs: services as processes, a coordinator over one replica or more, and clients that ask in loops.

Two coordinators share the services and take turns of some seconds at each load: one shows what calls cost, and clients
of the other, with other prompts, are timed, which is what a simulation is compared with. So a machine that grows slower
or faster does so for both. Knows nothing of simulations.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import mean

from pydantic import TypeAdapter

from paceline.client import NO_RETRIES, Client
from paceline.files import replace_file
from paceline.measure.load.load import LoadLog, SentRequest, run_loops
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.process.service_process import running_service
from paceline.simulate.saved_costs import SavedCosts
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, OutputPiece, TokenIds

Prompts = Sequence[tuple[int, ...]]
REQUEST_COUNTS = {1: 16, 4: 24, 8: 32, 16: 48}
"""Requests of a turn by the number of clients: two to three seconds of each on two cores."""
TURNS = 8
"""Of each coordinator at each load."""
ROUND_TRIP_EVERY_S = 0.1
FROM_DRAFT = DraftingOptions(sources=(DraftSource.DRAFT,))
"""What sources without a model find depends on the texts, which a simulation does not have."""


@dataclass(frozen=True)
class RealRun:
    """What so many clients saw in one turn."""

    client_count: int
    round_trip_s: float
    """Mean seconds of a small call between client and coordinator meanwhile."""
    prompt_counts: tuple[int, ...]
    """Lengths of the requests' prompts and outputs, in the order in which they were sent."""
    output_counts: tuple[int, ...]
    records: tuple[SentRequest, ...]


@dataclass(frozen=True)
class RealCluster:
    replica_count: int
    saved: SavedCosts
    compared: SavedCosts
    """Costs of the timed calls themselves: with these a simulation shows its own errors, without the machine's drift.
    """
    runs: tuple[RealRun, ...]


_FORM = TypeAdapter(RealCluster)


def write_real(path: Path, real: RealCluster) -> None:
    replace_file(path, _FORM.dump_json(real).decode() + "\n")


def read_real(path: Path) -> RealCluster:
    return _FORM.validate_json(path.read_bytes())


async def measure(
    options: ClusterOptions, replica_count: int, prompts: Prompts, max_new_tokens: int, tell: Callable[[str], None]
) -> RealCluster:
    """Measure all loads. The first half of the prompts shows costs, the second is compared."""
    plan = plan_cluster(options)
    assert plan.draft
    async with AsyncExitStack() as stack:
        flags = [(plan.target.module, plan.target.flags)] * replica_count
        targets = [await stack.enter_async_context(running_service(*one)) for one in flags]
        draft = await stack.enter_async_context(running_service(plan.draft.module, plan.draft.flags))
        addresses = ("--target", ",".join(one.address for one in targets), "--draft", draft.address)
        flags_of_both = (*plan.coordinator.flags, *addresses, "--prepared-rounds", "false")
        clients = []
        for _ in range(2):
            coordinator = await stack.enter_async_context(running_service(plan.coordinator.module, flags_of_both))
            clients.append(await stack.enter_async_context(Client(coordinator.address, NO_RETRIES)))
        costing, client = clients
        half, runs = len(prompts) // 2, []
        shown, timed = cycle(prompts[:half]), cycle(prompts[half:])
        await _run(client, 4, shown, max_new_tokens)  # services begin slowly
        for client_count in REQUEST_COUNTS:
            for _ in range(TURNS):
                await _run(costing, client_count, shown, max_new_tokens)
                runs.append(await _run(client, client_count, timed, max_new_tokens))
            tell(f"{client_count} clients: measured")
        saved, compared = [SavedCosts.of(await one.describe(include_costs=True)) for one in clients]
    return RealCluster(replica_count, saved, compared, tuple(runs))


async def _run(client: Client, client_count: int, prompts: Iterator[tuple[int, ...]], max_new_tokens: int) -> RealRun:
    """Send the requests of a turn."""
    count = REQUEST_COUNTS[client_count]
    chosen = [*islice(prompts, count)]
    output_counts = [0] * count

    async def generate(request: GenerationRequest) -> AsyncIterator[OutputPiece]:
        async for piece in client.generate(request):
            if piece.finish:
                output_counts[request.seed or 0] = piece.finish.usage.output_count
            yield piece

    log = LoadLog()
    requests = [
        GenerationRequest(TokenIds(one), max_new_tokens, seed=number, drafting=FROM_DRAFT)
        for number, one in enumerate(chosen)
    ]
    round_trips_s: list[float] = []
    looking = asyncio.create_task(_look(client, round_trips_s))
    await run_loops(requests, client_count, generate, log)
    looking.cancel()
    trip_s = mean(round_trips_s)
    return RealRun(client_count, trip_s, tuple(map(len, chosen)), tuple(output_counts), tuple(log.records))


async def _look(client: Client, round_trips_s: list[float]) -> None:
    """Time small calls, again and again: on cores that all share, the way to the coordinator grows with the load."""
    while True:
        began_s = time.perf_counter()
        await client.describe_once()
        round_trips_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(ROUND_TRIP_EVERY_S)
