"""Metrics of the coordinator as a whole, read at each scrape in the event loop that owns the numbers.

The counts of `statistics` are read and not counted a second time. `docs/metrics.md` says what the numbers mean.
"""

import asyncio
from collections import Counter as Counts
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.door.current_model import CurrentModel
from coordinator.drafting.draft_models import DraftModels
from coordinator.placement.dispatcher import Dispatcher
from coordinator.rounds.statistics import Statistics
from paceline.observe.metrics import model_info
from paceline.types import CircuitState, DraftSource, ReplicaDescription, ReplicaState, SourceUsage, added_up

SCRAPE_TIMEOUT_S = 10.0
"""Seconds to wait for the event loop: Prometheus waits no longer either."""


class ClusterCollector(Collector):
    """Collects counts and states at the moment of the scrape. Must be constructed in the loop that changes them.

    A scrape runs in a thread of its own. Dictionaries read there could change during the iteration.
    """

    def __init__(
        self,
        model: CurrentModel,
        dispatcher: Dispatcher,
        drafts: DraftModels,
        statistics: Statistics,
        *,
        has_draft_service: bool,
    ) -> None:
        """`has_draft_service` is False where there is to be none: nothing then tells that it is not available."""
        self._has_draft_service = has_draft_service
        self._model = model
        self._dispatcher = dispatcher
        self._drafts = drafts
        self._statistics = statistics
        self._loop = asyncio.get_running_loop()

    def collect(self) -> list[Metric]:
        if not self._loop.is_running() or _loop_here() is self._loop:
            return list(self._metrics())
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(SCRAPE_TIMEOUT_S)

    async def _read(self) -> list[Metric]:
        return list(self._metrics())

    def _metrics(self) -> Iterator[Metric]:
        dispatcher, counted = self._dispatcher, self._statistics.snapshot()
        yield model_info("coordinator", self._model.known_target)
        for name, text, value in (
            ("sequences_running", "Generations with a place in the pool.", dispatcher.live_count),
            ("sequences_waiting", "Generations waiting for a place.", dispatcher.waiting_count),
            ("sequences_waiting_limit", "Most generations that may wait; more are refused.", dispatcher.queue_limit),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", text, value)
        if self._has_draft_service:
            available = self._drafts.is_healthy
            yield GaugeMetricFamily("paceline_draft_available", "1 while a draft replica's calls go well.", available)
        yield _replica_counts({"target": dispatcher.describe(), "draft": self._drafts.describe()})
        for name, text, value in (
            ("rounds", "Rounds run.", counted.round_count),
            (
                "fallback_rounds",
                "Rounds whose policy found no group of the kind it wants.",
                counted.fallback_round_count,
            ),
            ("draft_tokens", "Draft tokens verified.", counted.drafted_count),
            ("accepted_tokens", "Draft tokens accepted.", counted.accepted_count),
            ("committed_tokens", "Output tokens, accepted and the target's own.", counted.committed_count),
            ("prepared_rows", "Rows of rounds for which drafts were prepared.", self._drafts.prepared_row_count),
            ("prepared_hits", "Those that had their drafts without a call.", self._drafts.prepared_hit_count),
            ("preemptions", "Generations that gave their cache up for others.", counted.preemption_count),
            ("sequences_moved", "Generations that lost their target and were sent to another.", dispatcher.moved_count),
        ):
            yield CounterMetricFamily(f"paceline_{name}", text, value)
        positions = CounterMetricFamily(
            "paceline_accepted_tokens_per_position",
            "Draft tokens accepted, by their place in the draft, from 0.",
            labels=["position"],
        )
        for position, count in enumerate(counted.accepted_counts_by_position):
            positions.add_metric([str(position)], count)
        yield positions
        yield from _source_counts(counted.sources)


def _loop_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _source_counts(usages: Iterable[SourceUsage]) -> Iterator[Metric]:
    """Count draft tokens by source. All sources have series from the start: a rate misses the step from nothing."""
    labels = ["source", "draft_model"]
    drafted = CounterMetricFamily("paceline_source_draft_tokens", "Draft tokens verified, by source.", labels=labels)
    accepted = CounterMetricFamily(
        "paceline_source_accepted_tokens", "Draft tokens accepted, by source.", labels=labels
    )
    known = [SourceUsage(one) for one in DraftSource if one is not DraftSource.UNSPECIFIED]
    for one in added_up((*known, *usages)):
        drafted.add_metric([one.source.value, one.model], one.drafted_count)
        accepted.add_metric([one.source.value, one.model], one.accepted_count)
    return iter((drafted, accepted))


def _replica_counts(replicas: dict[str, list[ReplicaDescription]]) -> Metric:
    """Count replicas by state. A replica that is up but whose circuit is not closed counts as "open"."""
    family = GaugeMetricFamily(
        "paceline_replicas", "Replicas of the model services, by their state.", labels=["component", "state"]
    )
    for component, described in replicas.items():
        counts = Counts(
            "open"
            if one.state is ReplicaState.UP and one.circuit not in (None, CircuitState.CLOSED)
            else one.state.value
            for one in described
        )
        states = [one.value for one in ReplicaState if one is not ReplicaState.UNSPECIFIED]
        for state in (*states, "open"):
            family.add_metric([component, state], counts[state])
    return family
