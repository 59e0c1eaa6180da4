"""Histograms of what is observed round by round, in one thread.

One of prometheus_client takes a lock twice and checks its labels for each value; these do neither, and take many values
at once. Knows nothing of what is observed.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as Example
from prometheus_client.utils import floatToGoString

from paceline.observe.metrics import Exemplar


class Values:
    """Observed values, by the bucket of each."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.bounds = [*buckets, inf]
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0
        self.examples: dict[int, Example] = {}
        """The latest value with an exemplar, by bucket."""

    def observe(self, value: float, exemplar: Exemplar = None) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar:
            self.examples[bucket] = Example(exemplar, value, time.time())

    def observe_all(self, values: Iterable[float]) -> None:
        for value, count in Counter(values).items():
            self.counts[bisect_left(self.bounds, value)] += count
            self.sum += value * count


class Histogram(Collector):
    """Values by their labels, as one metric."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry, labels: Sequence[str] = ()
    ) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self._labels = labels
        self._values: dict[tuple[str, ...], Values] = {}
        registry.register(self)

    def of(self, *labels: str) -> Values:
        """Return the values with these labels, to be observed by one thread alone."""
        return self._values.setdefault(labels, Values(self._buckets))

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, values in self._values.items():
            buckets: list[tuple[str, float] | tuple[str, float, Example]] = []
            for bucket, count in enumerate(accumulate(values.counts)):
                le: str = floatToGoString(values.bounds[bucket])  # type: ignore[no-untyped-call]
                example = values.examples.get(bucket)
                buckets.append((le, count, example) if example else (le, count))
            family.add_metric(labels, buckets, values.sum)
        yield family
