"""Reading a registry as a scrape would, and what queries name of it."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

REFERENCE = Path(__file__).parents[1] / "docs" / "metrics.md"
"""A test compares it with what the services expose."""
COLOUR = "app_kubernetes_io_instance"
"""Label of the pods, which our PodMonitor puts on every series."""
OF_PROMETHEUS = {"namespace", "job", "instance", "pod", COLOUR}
"""Labels that Prometheus sets on every series."""


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Return the value of one sample, `name` as exposed and without its prefix."""
    found = registry.get_sample_value(f"paceline_{name}", labels)
    assert found is not None, f"paceline_{name}{labels} is not exposed"
    return found


def by_label(registry: CollectorRegistry, name: str, label: str) -> dict[str, float]:
    """Return a metric's samples other than 0, by one of its labels."""
    return {
        sample.labels[label]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"paceline_{name}" and sample.value
    }


def documented_metrics() -> list[tuple[str, str, frozenset[str]]]:
    """Return name, type and labels of each metric of the reference."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(name, kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows]


def documented_labels() -> dict[str, frozenset[str]]:
    """Return the labels of each series of the reference."""
    found = {}
    for name, kind, labels in documented_metrics():
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + suffix] = labels | {"le"} if suffix == "_bucket" else labels
    return found


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Return the metrics that a query names, with the labels that it selects them by; records of rules are left out."""
    named = re.findall(r"\b(paceline_\w+)(?:\{([^}]*)\})?", query)
    return [(metric, set(re.findall(r"(\w+)\s*[=!]", inner))) for metric, inner in named]


def unknown_selectors(query: str) -> list[tuple[str, set[str]]]:
    """Return those of a query's selectors that name a metric or a label which the reference has not."""
    known = documented_labels()
    return [
        (metric, labels)
        for metric, labels in selectors(query)
        if metric not in known or not labels <= known[metric] | OF_PROMETHEUS
    ]
