"""A coordinator's parts, put together as its settings say.

Who its replicas are and who may call it is `serving`'s to know.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import structlog
from opentelemetry.trace import Tracer

from coordinator.background import Background
from coordinator.cluster_metrics import ClusterCollector
from coordinator.config import CoordinatorSettings
from coordinator.door.admission import Admission
from coordinator.door.current_model import CurrentModel
from coordinator.door.limits import RequestLimits
from coordinator.door.served import Served
from coordinator.drafting.draft_models import DraftModels
from coordinator.drafting.guarded_draft import GuardedDraft
from coordinator.drafting.guessers import Guessers
from coordinator.drafting.native import find_library
from coordinator.drafting.prepared import PreparedDrafter
from coordinator.drafting.replicated_drafter import ReplicatedDrafter
from coordinator.drafting.shared_suffixes import SharedSuffixes
from coordinator.placement.dispatcher import Dispatcher
from coordinator.placement.guarded_target import FAILURES_TO_OPEN, GuardedTarget, UsualTime
from coordinator.placement.target import Serving
from coordinator.protocols import Drafters, RemoteTarget, Verifier
from coordinator.replicas.circuit import Circuit
from coordinator.replicas.replica import Replica
from coordinator.replicas.way import Way
from coordinator.rounds.auto_planner import AutoPlanner
from coordinator.rounds.draft_worth import DraftWorth
from coordinator.rounds.fixed_planner import FixedPlanner
from coordinator.rounds.grouping import Grouping, Groups
from coordinator.rounds.guarded_planner import GuardedPlanner
from coordinator.rounds.metrics import RoundMetrics
from coordinator.rounds.policies import make_policy
from coordinator.rounds.pool import GenerationPool
from coordinator.rounds.residency import Residency
from coordinator.rounds.round import RoundLimits
from coordinator.rounds.scheduler import Others, Scheduler
from coordinator.rounds.statistics import Statistics
from coordinator.rounds.tracer import RoundTracer
from coordinator.rounds.turn_times import TurnTimes
from coordinator.rounds.wishes import DraftPlanner
from paceline.errors import StartupError
from paceline.process.instruments import Instruments
from paceline.types import PAPER_POLICIES, DraftSource, ModelDescription

log = structlog.get_logger()

SHARED_TOKENS = 2_000_000
"""Tokens of recent outputs that are kept with `--shared-suffixes`: 40 MB."""


@dataclass(frozen=True)
class Clocks:
    """Where rounds and circuits read the time, in seconds. Tests have clocks of their own."""

    rounds: Callable[[], float] = time.perf_counter
    circuits: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    """What makes pauses of circuits differ."""


SYSTEM_CLOCKS = Clocks()


@dataclass(frozen=True)
class ServingMaker:
    """Makes what serves with a target. All of them count together."""

    settings: CoordinatorSettings
    drafters: Drafters
    residency: Residency
    statistics: Statistics
    metrics: RoundMetrics
    tracer: RoundTracer
    clocks: Clocks
    usual: UsualTime = field(default_factory=UsualTime)

    def of_replica(self, replica: Replica[RemoteTarget], dispatcher: Dispatcher) -> Serving:
        assert replica.description
        return self.make(replica.address, replica.remote, replica.description, dispatcher, dispatcher.distribute)

    def make(
        self, address: str, remote: Verifier, target: ModelDescription, others: Others, on_room: Callable[[], None]
    ) -> Serving:
        settings, clocks, way = self.settings, self.clocks, Way()
        circuit = Circuit(clocks.circuits, clocks.jitter, failures_to_open=FAILURES_TO_OPEN)
        guard = GuardedTarget(remote, target.vocabulary_size, self.usual, circuit, clocks.rounds)
        scheduler = Scheduler(
            address,
            GenerationPool(_places(settings), clocks.rounds, on_room),
            make_policy(settings.policy, settings.window),
            _grouping(settings, target, way),
            self.drafters,
            guard,
            self.residency,
            others,
            way,
            lanes=settings.lane_count,
            lanes_are_fixed=settings.lanes is not None,
            limits=_round_limits(target),
            statistics=self.statistics,
            metrics=self.metrics,
            tracer=self.tracer,
            clock=clocks.rounds,
        )
        return Serving(guard, scheduler)


@dataclass(frozen=True)
class Parts:
    """A coordinator that has no replicas and no callers yet."""

    model: CurrentModel
    dispatcher: Dispatcher
    drafts: DraftModels
    residency: Residency
    statistics: Statistics
    sources: Callable[[ModelDescription], tuple[DraftSource, ...]]
    """Returns the sources that drafts can come from for a target."""


def wired(
    settings: CoordinatorSettings, tasks: Background, watched: Instruments, clocks: Clocks = SYSTEM_CLOCKS
) -> Parts:
    """Put a coordinator's parts together. Raise StartupError for a setting that this installation does not have."""
    guessers = _guessers(settings)
    statistics = Statistics()
    dispatcher: Dispatcher  # which frees at the drafts what it no longer serves, so they are made first
    drafts = DraftModels(
        lambda replica: GuardedDraft(replica, Circuit(clocks.circuits, clocks.jitter), clocks.rounds),
        partial(_prepared, settings, watched.tracer, clocks, lambda: dispatcher.models),
    )
    residency = Residency(drafts)
    metrics, tracer = RoundMetrics(watched.registry), RoundTracer(watched.tracer, settings.policy)
    maker = ServingMaker(settings, drafts, residency, statistics, metrics, tracer, clocks)
    dispatcher = Dispatcher(
        maker.of_replica,
        residency,
        tasks,
        queue_limit=settings.queue_limit,
        target_wait_s=settings.target_wait_s,
        clock=clocks.rounds,
    )
    model = CurrentModel(partial(_admission, settings, guessers), dispatcher, drafts)
    # Before there is a target: that none is found must show.
    watched.registry.register(
        ClusterCollector(model, dispatcher, drafts, statistics, has_draft_service=bool(settings.draft_addresses))
    )
    return Parts(model, dispatcher, drafts, residency, statistics, partial(_sources, settings, guessers))


def _prepared(
    settings: CoordinatorSettings,
    tracer: Tracer | None,
    clocks: Clocks,
    targets: Callable[[], Sequence[ModelDescription]],
    replicas: ReplicatedDrafter,
) -> PreparedDrafter:
    """Return what is asked in place of the draft services of one model."""

    def has_room() -> bool:
        pairs = product(replicas.models, targets())
        return any(draft.compute.has_room_beside(target.compute) for draft, target in pairs)

    prepared = PreparedDrafter(
        replicas, clocks.rounds, tracer, may_prepare=settings.prepared_rounds, has_room_beside_target=has_room
    )
    replicas.listen(prepared.take)
    return prepared


def _guessers(settings: CoordinatorSettings) -> Guessers | None:
    """Return what makes sources without a model; the paper's algorithms, and plain decoding, have none.

    Raise StartupError when suffixes are to be shared and their index was not compiled.
    """
    if not settings.draft_count or settings.policy in PAPER_POLICIES:
        return None
    library = find_library()
    if library is None:
        if settings.shared_suffixes:
            raise StartupError(
                "--shared-suffixes is true, and the index of suffixes was not compiled; install the package anew, "
                "where there is a C++17 compiler, or give false"
            )
        return None
    return Guessers(library, SharedSuffixes(library, SHARED_TOKENS) if settings.shared_suffixes else None)


def _admission(settings: CoordinatorSettings, guessers: Guessers | None, served: Served) -> Admission:
    _tell_if_nothing_drafts(settings, guessers, served.target)
    limits = RequestLimits(
        settings.max_prompt_tokens,
        settings.max_output_tokens,
        settings.max_completions,
        max_together=_places(settings) + settings.queue_limit,
    )
    return Admission(served, default_max_new_tokens=settings.max_new_tokens, limits=limits, guessers=guessers)


def _tell_if_nothing_drafts(settings: CoordinatorSettings, guessers: Guessers | None, target: ModelDescription) -> None:
    """Warn where drafts are wanted, and no source of them can come: outputs are the same, and slower than hoped for."""
    if settings.draft_count == 0 or _sources(settings, guessers, target):
        return
    log.warning(
        "nothing drafts, so decoding plainly: --draft is none, the target has no heads that are used, and suffix and "
        "prediction are not there; name a draft service, or give --draft-count 0 where plain decoding is meant",
        draft_count=settings.draft_count,
        policy=settings.policy,
    )


def _sources(
    settings: CoordinatorSettings, guessers: Guessers | None, target: ModelDescription
) -> tuple[DraftSource, ...]:
    """Return the sources that drafts can come from; none in plain decoding."""
    if settings.draft_count == 0:
        return ()
    found = {
        DraftSource.DRAFT: settings.draft_addresses,
        DraftSource.SUFFIX: guessers,
        DraftSource.PREDICTION: guessers,
        DraftSource.HEADS: _heads_count(settings, target),
    }
    return tuple(source for source, there in found.items() if there)


def _round_limits(target: ModelDescription) -> RoundLimits:
    cache = target.cache
    return RoundLimits(
        target.vocabulary_size,
        cache.prefill_chunk_tokens,
        cache.token_bytes,
        cache.page_tokens,
        target.max_rows,
        target.heads_draft_count,
    )


def _places(settings: CoordinatorSettings) -> int:
    """Return how many generations are live at once on a target."""
    policy = make_policy(settings.policy, settings.window)
    return policy.live_limit(settings.batch_size, settings.lane_count)


def _group_size(settings: CoordinatorSettings, target: ModelDescription) -> int:
    """Return the most rows of a group: a target refuses all rows of a call that has more than it says it takes."""
    size = min(settings.batch_size, target.max_rows or settings.batch_size)
    if size < settings.batch_size:
        log.warning(
            "the target takes fewer rows in a call than --batch-size, so groups are smaller; give it more --max-rows",
            model=target.model_id,
            max_rows=size,
            batch_size=settings.batch_size,
        )
    return size


def _grouping(settings: CoordinatorSettings, target: ModelDescription, way: Way) -> Grouping:
    """Return how groups are formed; in one lane as many rows are live as in several, unless lanes were asked for."""
    lanes, size = settings.lane_count, _group_size(settings, target)
    alone = _groups(settings, target, way, size, lanes)
    if settings.lanes is not None or lanes == 1:
        return Grouping(alone)
    return Grouping(alone, _groups(settings, target, way, lanes * size, 1))


def _groups(settings: CoordinatorSettings, target: ModelDescription, way: Way, size: int, lanes: int) -> Groups:
    planner = GuardedPlanner(_planner(settings, target, way, lanes))
    return Groups(size, planner, DraftWorth(lanes, planner.leeway), TurnTimes(lanes))


def _planner(settings: CoordinatorSettings, target: ModelDescription, way: Way, lanes: int) -> DraftPlanner:
    heads_count = _heads_count(settings, target)
    if settings.draft_count == "auto":
        return AutoPlanner(lanes, heads_count, way, chooses_lanes=settings.lanes is None)
    return FixedPlanner(settings.draft_count, heads_count, lanes=lanes)


def _heads_count(settings: CoordinatorSettings, target: ModelDescription) -> int:
    """Return how many tokens a target's heads draft; the paper's algorithms have none of theirs."""
    return 0 if settings.policy in PAPER_POLICIES else target.heads_draft_count
