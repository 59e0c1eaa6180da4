"""Metrics of a model service: calls and passes are counted as they end, the cache is read at each scrape.

Knows which numbers there are; `docs/metrics.md` says what they mean.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.runner import PassSize
from paceline.observe.metrics import (
    ROUND_BUCKETS_S,
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    active_exemplar,
    model_info,
)
from paceline.types import CacheDescription, CallTiming, ModelDescription

CALL_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)


class ModelMetrics:
    """Metrics that are counted live; the label `component` tells draft and target apart."""

    def __init__(self, registry: CollectorRegistry, component: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"paceline_{name}", text, ["component"], buckets=buckets, registry=registry)
            return family.labels(component)

        self._queued = histogram(
            "call_queue_seconds", "Time a propose or verify call waited for the model.", ROUND_BUCKETS_S
        )
        self._executed = histogram(
            "call_execute_seconds", "Time the model worked on a propose or verify call.", ROUND_BUCKETS_S
        )
        self._calls = histogram("turn_calls", "Propose or verify calls that were served together.", CALL_BUCKETS)
        self._rows = histogram("pass_rows", "Sequences in a forward pass.", ROW_BUCKETS)
        self._tokens = histogram("pass_tokens", "Tokens computed by a forward pass.", TOKEN_BUCKETS)
        self._prompt_tokens = Counter(
            "paceline_prefill_tokens", "Tokens computed for rows that bring a prompt.", ["component"], registry=registry
        ).labels(component)

    def call_ended(self, timing: CallTiming) -> None:
        exemplar = active_exemplar()
        self._queued.observe(timing.queued_s, exemplar)
        self._executed.observe(timing.executed_s, exemplar)

    def turn_begins(self, call_count: int) -> None:
        self._calls.observe(call_count)

    def pass_ended(self, size: PassSize) -> None:
        self._rows.observe(size.row_count)
        self._tokens.observe(size.token_count)
        self._prompt_tokens.inc(size.prompt_token_count)


class ModelCollector(Collector):
    """Metrics of the model and its cache, read at the moment of the scrape, in the scrape's thread."""

    def __init__(self, component: str, describe: Callable[[], ModelDescription]) -> None:
        self._component = component
        self._describe = describe

    def collect(self) -> Iterator[Metric]:
        model = self._describe()
        yield model_info(self._component, model)
        cached = CounterMetricFamily(
            "paceline_prompt_cached_tokens",
            "Prompt tokens found in the cache instead of being computed.",
            labels=["component", "model"],
        )
        cached.add_metric([self._component, model.model_id], model.cache.shared_token_count)
        yield cached
        yield from self._cache(model.cache)

    def _cache(self, cache: CacheDescription) -> Iterator[Metric]:
        for kind, name, text, value in (
            (GaugeMetricFamily, "kv_capacity_bytes", "Memory the cache may take.", cache.capacity_bytes),
            (GaugeMetricFamily, "kv_used_bytes", "Cache memory held by sequences.", cache.used_bytes),
            (GaugeMetricFamily, "kv_idle_bytes", "Cache memory kept for prompts that begin alike.", cache.idle_bytes),
            (GaugeMetricFamily, "kv_sequences", "Sequences that hold cache memory.", cache.sequence_count),
            (CounterMetricFamily, "realigned_bytes", "Bytes the dense layout copied.", cache.realigned_bytes),
            (CounterMetricFamily, "realignment_seconds", "Time the dense layout realigned.", cache.realignment_s),
        ):
            family = kind(f"paceline_{name}", text, labels=["component"])
            family.add_metric([self._component], value)
            yield family
