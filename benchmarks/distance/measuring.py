"""The work: model services, proxies that keep a coordinator away from one of them, and coordinators in turn.

Each case has two coordinators of its own, which differ in `--prepared-rounds` alone and share model services and proxy.
Knows nothing of tables.
"""

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from benchmarks.distance.result import Case, Comparison, FarService, Run
from benchmarks.scrapes import scraped
from paceline.client import Client
from paceline.measure.alternate import WARM_UP, alternate
from paceline.measure.cluster import ClusterSystem
from paceline.measure.contention import Watch
from paceline.measure.rounds import RoundUse
from paceline.measure.system import Measured
from paceline.process.cluster_plan import ClusterOptions, ServicePlan, plan_cluster
from paceline.process.launcher import Addresses, running_cluster
from paceline.process.service_process import Endpoint, running_service
from paceline.types import SamplingParameters
from tests.fakes.proxy import running_proxy

HITS = "paceline_prepared_hits_total"

Prompts = Sequence[tuple[int, ...]]
Outputs = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DistancePlan:
    pair: ClusterOptions
    delays_ms: tuple[float, ...]
    """Round trips between the coordinator and the far service."""
    batch_sizes: tuple[int, ...]
    run_count: int
    max_new_tokens: int


@dataclass(frozen=True)
class Observer:
    """Callbacks that tell how the work goes."""

    started: Callable[[str, int], None]
    """Gets the name of a part of the work and its number of passes."""
    advanced: Callable[[], None]
    compared: Callable[[Comparison], None]


class CountedSystem:
    """A coordinator's cluster, at one temperature, that counts rows whose drafts were prepared."""

    def __init__(self, system: ClusterSystem, metrics_url: str) -> None:
        self._system = system
        self._metrics_url = metrics_url
        self.prepared_row_count = 0
        """Of the last pass."""

    async def run(self, prompts: Prompts) -> Measured:
        before = await self._hit_count()
        measured = await self._system.run(prompts)
        self.prepared_row_count = await self._hit_count() - before
        return measured

    async def _hit_count(self) -> int:
        return next(int(one.value) for one in await scraped(self._metrics_url) if one.name == HITS)


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose timers are exact to microseconds; those of epoll and uvloop count whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def measure(plan: DistancePlan, prompts: Prompts, watch: Watch, observer: Observer) -> None:
    """Compare all cases; `observer.compared` gets each when it is done. Run it in an `exact_loop`."""
    for batch_size in plan.batch_sizes:
        options = options_at(plan.pair, batch_size)
        own = prompts_at(prompts, batch_size)
        async with running_cluster(options) as near:
            work = _Work(plan, batch_size, plan_cluster(options).coordinator, near, own, watch, observer)
            expected = {one: await work.outputs_alone(one) for one in temperatures_at(batch_size)}
            for far, delay_ms in product(get_args(FarService), plan.delays_ms):
                await work.compare(far, delay_ms, expected)


def options_at(pair: ClusterOptions, batch_size: int) -> ClusterOptions:
    """Return the services' options. B = 1 has one lane, as two lanes would be two generations at once."""
    lanes = 1 if batch_size == 1 else pair.lanes
    return replace(pair, batch_size=batch_size, lanes=lanes, prefix_sharing=False)


def prompts_at(prompts: Prompts, batch_size: int) -> Prompts:
    """Return the prompts for a batch size: a quarter at B = 1, where they are answered one by one."""
    return prompts[::4] if batch_size == 1 else prompts


def temperatures_at(batch_size: int) -> tuple[float, ...]:
    return (0.0, 1.0) if batch_size == 1 else (0.0,)


@dataclass(frozen=True)
class _Work:
    """What the cases of one batch size share."""

    plan: DistancePlan
    batch_size: int
    coordinator: ServicePlan
    near: Addresses
    """Of a cluster that nothing is far from: its model services serve all coordinators."""
    prompts: Prompts
    watch: Watch
    observer: Observer

    async def outputs_alone(self, temperature: float) -> Outputs:
        """Return what the target answers without drafts."""
        async with Client(self.near.coordinator) as client:
            return (await self._system(client, temperature, 0).run(self.prompts)).outputs

    async def compare(self, far: FarService, delay_ms: float, expected: Mapping[float, Outputs]) -> None:
        """Compare the cases of one distance. `expected` has the outputs of the target alone, by temperature."""
        passes: dict[tuple[float, bool], list[Run]] = {key: [] for key in product(expected, (False, True))}
        name = f"B = {self.batch_size}, {far} at {delay_ms:g} ms"
        self.observer.started(name, len(passes) * (self.plan.run_count + 1))
        async with AsyncExitStack() as stack:
            addresses = await stack.enter_async_context(self._kept_away(far, delay_ms))
            ends = {one: await stack.enter_async_context(self._coordinator(addresses, one)) for one in (False, True)}
            clients = {one: await stack.enter_async_context(Client(end.address)) for one, end in ends.items()}
            systems = {
                key: CountedSystem(self._system(clients[key[1]], key[0]), ends[key[1]].metrics_url or "")
                for key in passes
            }

            def record(key: tuple[float, bool], number: int, measured: Measured) -> None:
                self.observer.advanced()
                if number != WARM_UP:
                    passes[key].append(_run(measured, systems[key].prepared_row_count, expected[key[0]]))

            # What was disturbed is told and not repeated: there are many cases, and each waits for its distance.
            await alternate(systems, self.prompts, self.plan.run_count, record, self.watch, repeats=0)
        for temperature in expected:
            without, prepared = (tuple(passes[temperature, one]) for one in (False, True))
            case = Case(far, delay_ms, self.batch_size, temperature)
            self.observer.compared(Comparison(case, len(self.prompts), without, prepared))

    def _system(self, client: Client, temperature: float, max_draft_count: int | None = None) -> ClusterSystem:
        sampling = SamplingParameters(temperature=temperature)
        return ClusterSystem(client, self.near, self.plan.max_new_tokens, max_draft_count, sampling=sampling)

    @asynccontextmanager
    async def _kept_away(self, far: FarService, delay_ms: float) -> AsyncIterator[dict[str, str]]:
        """Yield the addresses by which a coordinator is to reach draft and target."""
        addresses = {"draft": self.near.draft or "", "target": self.near.target}
        async with running_proxy(addresses[far], delay_ms / 2e3) as proxy:
            yield addresses | {far: proxy.address}

    def _coordinator(
        self, addresses: Mapping[str, str], prepared_rounds: bool
    ) -> AbstractAsyncContextManager[Endpoint]:
        models = [word for role, address in addresses.items() for word in (f"--{role}", address)]
        own = ("--prepared-rounds", str(prepared_rounds), "--metrics-port", "0")
        return running_service(self.coordinator.module, (*self.coordinator.flags, *models, *own))


def _run(measured: Measured, prepared_row_count: int, expected: Outputs) -> Run:
    equal_count = sum(one == other for one, other in zip(measured.outputs, expected, strict=True))
    return Run(
        measured.elapsed_s,
        measured.output_count,
        measured.rounds or RoundUse(),
        prepared_row_count,
        equal_count,
        measured.contention,
    )
