"""Reading a registry as a scrape would."""

from prometheus_client import CollectorRegistry


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
