"""Our histograms show what prometheus_client's would."""

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from paceline.observe.histograms import Histogram
from paceline.observe.metrics import Registry

BUCKETS = (0.5, 1, 2.5)
VALUES = {"a": (0.1, 0.5, 0.5, 0.7, 2.5, 9.0), "b": (1.0,)}


def exposed(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_values_are_exposed_as_by_the_library() -> None:
    ours, theirs = Registry(), Registry()
    own = Histogram("seconds", "Time.", BUCKETS, ours, ["part"])
    other = prometheus_client.Histogram("seconds", "Time.", ["part"], buckets=BUCKETS, registry=theirs)
    for part, values in VALUES.items():
        own.of(part).observe(values[0])
        own.of(part).observe_all(values[1:])
        for value in values:
            other.labels(part).observe(value)
    assert exposed(ours) == exposed(theirs)


def test_a_histogram_without_labels_shows_before_its_first_value() -> None:
    ours, theirs = Registry(), Registry()
    Histogram("rows", "Rows.", BUCKETS, ours).of()
    prometheus_client.Histogram("rows", "Rows.", buckets=BUCKETS, registry=theirs)
    assert exposed(ours) == exposed(theirs)
