"""A service's metrics registry and tracer, made at start and handed down."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from paceline.observe.metrics import count_tasks, metrics_served, new_registry
from paceline.observe.spans.setup import tracing
from paceline.process.settings import ProcessSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True)
class Instruments:
    registry: CollectorRegistry
    tracer: "Tracer | None" = None
    """None when tracing is off."""
    metrics_url: str | None = None
    """None when metrics are not served."""


@contextmanager
def instruments(role: str, settings: ProcessSettings) -> Iterator[Instruments]:
    """Serve metrics and send spans by the settings while the block runs. Call it in the service's event loop.

    Raise AddressInUse or StartupError.
    """
    registry = new_registry(role)
    count_tasks(registry, role)
    with (
        tracing(role, settings.trace_file) as tracer,
        metrics_served(registry, settings.metrics_host, settings.metrics_port) as metrics_url,
    ):
        yield Instruments(registry, tracer, metrics_url)
