"""The run of a simulation: coordinators as they are, simulated services, and requests at their times."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from structlog.testing import capture_logs

from coordinator.background import Background, background
from coordinator.config import CoordinatorSettings
from coordinator.door.admission import Admission
from coordinator.door.served import Served
from coordinator.replicas.replica import Replica
from coordinator.simulation.services import SimulatedDraft, SimulatedService, SimulatedTarget, Surroundings, described
from coordinator.simulation.simulated_time import SimulatedTimeLoop
from coordinator.simulation.texts import Texts
from coordinator.wiring import Clocks, Parts, wired
from paceline.errors import InvalidRequest
from paceline.measure.load.load import LoadLog, run_load, run_loops
from paceline.measure.load.summary import Objectives, summarize
from paceline.process.instruments import Instruments
from paceline.process.variables import NO_DRAFT
from paceline.simulate.call_times import CallTimes
from paceline.simulate.cluster import PlannedRequest, SimulatedCluster
from paceline.simulate.result import SimulationResult
from paceline.simulate.saved_costs import SavedCosts
from paceline.types import GenerationRequest, ModelDescription, OutputPiece

SOMEWHERE = "simulated:1"


def simulate(
    saved: SavedCosts,
    cluster: SimulatedCluster,
    requests: Sequence[PlannedRequest],
    *,
    client_count: int | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Answer the requests at their times, or by so many clients that each ask one after the other.

    The same arguments give the same result. Raise InvalidRequest where the costs do not say what the cluster needs.
    """
    # The coordinators' log would tell of services that are none.
    with capture_logs(), asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(_Simulation(saved, cluster, seed).run(requests, client_count))


class _Simulation:
    def __init__(self, saved: SavedCosts, cluster: SimulatedCluster, seed: int) -> None:
        self._saved = saved
        self._cluster = cluster
        self._coordinators: list[Parts] = []
        self._texts = Texts(saved.costs, saved.draft.model_id if saved.draft else "", seed)
        self._seed = seed
        self._jitter = Random(f"{seed} circuits").random
        times = CallTimes(saved.costs.calls_of())
        self._targets = [
            SimulatedService(
                name,
                saved.target,
                self._around(times, name, cluster.target_round_trip_s),
                cluster.target_stage_count,
            )
            for name in _names("target", cluster.target_count)
        ]
        self._drafts = self._made_drafts() if cluster.draft_count else []

    def _made_drafts(self) -> list[SimulatedService]:
        model = self._saved.draft
        names = _names("draft", self._cluster.draft_service_count)
        calls = self._saved.costs.calls_of(model.model_id) if model else []
        if names and not (calls and self._texts.has_drafts):
            of_model = f" of {model.model_id}, the draft that they name" if model else ""
            raise InvalidRequest(
                f"the costs know no draft service{of_model}; measure them where it drafts, or give --drafts 0"
            )
        if model is None:
            return []
        times = CallTimes(calls)
        return [
            SimulatedService(name, model, self._around(times, name, self._cluster.draft_round_trip_s)) for name in names
        ]

    def _around(self, times: CallTimes, name: str, round_trip_s: float) -> Surroundings:
        return Surroundings(times, round_trip_s, self._rounds_at_once, Random(f"{self._seed} {name}"))

    def _rounds_at_once(self) -> int:
        if self._cluster.apart:
            return 1
        return sum(one.statistics.costs.in_flight_count for one in self._coordinators)

    async def run(self, requests: Sequence[PlannedRequest], client_count: int | None) -> SimulationResult:
        log = LoadLog(asyncio.get_running_loop().time)
        numbered = [(one.at_s, one.request(number)) for number, one in enumerate(requests)]
        async with AsyncExitStack() as stack:
            for _ in range(self._cluster.coordinator_count):
                tasks = await stack.enter_async_context(background())
                parts = await self._coordinator(tasks)
                stack.push_async_callback(parts.dispatcher.close)
                self._coordinators.append(parts)
            doors = cycle([_Door(one, described(self._saved.target), self._cluster) for one in self._coordinators])

            def generate(request: GenerationRequest) -> AsyncIterator[OutputPiece]:
                return next(doors).generate(request)

            if client_count is None:
                await run_load(numbered, generate, log)
            else:
                await run_loops([request for _, request in numbered], client_count, generate, log)
        return self._result(log)

    async def _coordinator(self, tasks: Background) -> Parts:
        """Put a coordinator together, and let it find the services."""
        clock = asyncio.get_running_loop().time
        instruments = Instruments(CollectorRegistry())
        clocks = Clocks(clock, clock, self._jitter)
        parts = wired(_settings(self._cluster, bool(self._drafts)), tasks, instruments, clocks)
        targets = [
            Replica(one.name, SimulatedTarget(one, self._texts), _fits, parts.dispatcher.changed)
            for one in self._targets
        ]
        drafts = [Replica(one.name, SimulatedDraft(one), _fits, parts.drafts.changed) for one in self._drafts]
        for target in targets:
            parts.dispatcher.changed(target)
            await target.look()
        for draft in drafts:
            parts.drafts.changed(draft)
            await draft.look()
        return parts

    def _result(self, log: LoadLog) -> SimulationResult:
        counted = [one.statistics.snapshot() for one in self._coordinators]
        round_count = sum(one.round_count for one in counted)
        row_count = sum(size * count for one in counted for size, count in one.round_counts_by_group_size)
        summary = summarize(log.records, Objectives())
        services = tuple(one.use(summary.elapsed_s) for one in (*self._targets, *self._drafts))
        mean_size = row_count / round_count if round_count else 0.0
        return SimulationResult(summary, services, round_count, mean_size, tuple(log.records))


class _Door:
    """Where requests come in: as at a coordinator's door, without a wire."""

    def __init__(self, parts: Parts, target: ModelDescription, cluster: SimulatedCluster) -> None:
        self._dispatcher = parts.dispatcher
        self._admission = Admission(Served(target, None), default_max_new_tokens=1)
        self._round_trip_s = cluster.client_round_trip_s

    async def generate(self, request: GenerationRequest) -> AsyncIterator[OutputPiece]:
        await asyncio.sleep(self._round_trip_s)  # both ways at once: all that comes back is as much later
        admitted = self._admission.admit(request)
        self._dispatcher.submit(admitted)
        async for piece in admitted.stream.pieces():
            yield piece


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind} {number}" for number in range(1, count + 1)]


class _AskedSettings(CoordinatorSettings):
    """Settings that the environment has no say in: what services read here is not what is simulated."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _settings(cluster: SimulatedCluster, has_draft: bool) -> CoordinatorSettings:
    chosen: dict[str, Any] = {
        "draft": SOMEWHERE if has_draft else NO_DRAFT,
        "target": SOMEWHERE,
        "batch_size": cluster.batch_size,
        "lanes": cluster.lane_count,
        "draft_count": cluster.draft_count,
        # What draft services do while nobody waits has no measured cost.
        "prepared_rounds": False,
    }
    return _AskedSettings(**chosen)


async def _fits(replica: Replica[Any], model: ModelDescription) -> None:
    """Every model does."""
