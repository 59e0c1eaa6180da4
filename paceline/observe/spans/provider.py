"""The assembled OpenTelemetry SDK: the service's identity, sampling and exporters."""

import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from paceline.observe.spans.file_exporter import FileExporter
from paceline.observe.spans.lean import LeanTracer
from paceline.observe.spans.sampler import LinkedSampler

SCOPE = "paceline"
FLUSH_TIMEOUT_S = 3.0
MAX_LINKS = 1024
"""Links per span. A request links to each of its rounds, and the SDK would keep only 128."""


@contextmanager
def running_tracer(service: str, *, sends_otlp: bool, trace_file: Path | None) -> Iterator[LeanTracer]:
    """Export spans in threads of the SDK while the block runs, and the remaining ones on exit.

    Raise StartupError for a file that cannot be written, ValueError for a wrong variable.
    """
    exporters: list[SpanExporter] = [FileExporter(trace_file)] if trace_file else []
    if sends_otlp:
        exporters.append(OTLPSpanExporter())
    provider = make_provider(service)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = make_tracer(provider)
    try:
        yield tracer
    finally:
        try:
            tracer.flush()
        finally:
            _close(provider, exporters)


def make_provider(service: str) -> TracerProvider:
    """Make a provider without exporters, with the sampler and the resource of the standard variables."""
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    provider.sampler = LinkedSampler(provider.sampler)
    return provider


def make_tracer(provider: TracerProvider) -> LeanTracer:
    """Make the tracer for this project's spans."""
    return LeanTracer(provider, SCOPE, _limits())


def _limits() -> SpanLimits:
    """Return the limits of the standard variables, with `MAX_LINKS` as the default for links."""
    return SpanLimits() if "OTEL_SPAN_LINK_COUNT_LIMIT" in os.environ else SpanLimits(max_links=MAX_LINKS)


def _close(provider: TracerProvider, exporters: Iterable[SpanExporter]) -> None:
    """Send the remaining spans for at most `FLUSH_TIMEOUT_S`. The SDK would wait half a minute for a dead collector."""
    closing = threading.Thread(target=provider.shutdown, daemon=True)
    closing.start()
    closing.join(FLUSH_TIMEOUT_S)
    if closing.is_alive():
        for exporter in exporters:
            exporter.shutdown()  # ends the hanging call and prevents further ones
        closing.join(FLUSH_TIMEOUT_S)


class HashedResource(Resource):
    """A resource with a cached hash. The OTLP exporter hashes it for every span, which the SDK does by writing JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _resource(service: str) -> Resource:
    resource = Resource({"service.instance.id": str(uuid.uuid4())}).merge(Resource.create())
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": f"paceline-{service.removesuffix('_service')}"}))
    return HashedResource(resource)
