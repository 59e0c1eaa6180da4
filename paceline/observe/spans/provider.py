"""The assembled OpenTelemetry SDK: the service's identity, sampling and exporters."""

import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from paceline import __version__
from paceline.observe.spans.file_exporter import FileExporter
from paceline.observe.spans.protocols import OtlpProtocol, otlp_compression
from paceline.observe.spans.sampler import LinkedSampler

SCOPE = "paceline"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
FLUSH_TIMEOUT_S = 3.0
MAX_LINKS = 1024
"""Links per span. A shared round links to each of its requests, and the SDK would keep only 128."""
MAX_QUEUE_SIZE = 16_384
"""Ended spans that wait for their export. A request has hundreds at its end, and the SDK would keep only 2,048."""


@contextmanager
def running_tracer(service: str, protocol: OtlpProtocol | None, trace_file: Path | None) -> Iterator[Tracer]:
    """Export spans in threads of the SDK while the block runs, and the remaining ones on exit.

    Without a protocol nothing is sent. The provider becomes the global one, unless there is one already.
    Raise StartupError for a file that cannot be written or a wrong variable, ValueError for one that the SDK reads.
    """
    exporters: list[SpanExporter] = [FileExporter(trace_file)] if trace_file else []
    if protocol:
        exporters.append(_otlp_exporter(protocol))
    provider = make_provider(service)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, _limit("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUE_SIZE)))
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider)
    try:
        yield make_tracer(provider)
    finally:
        _close(provider, exporters)


def make_provider(service: str) -> TracerProvider:
    """Make a provider without exporters, with sampler, limits and resource of the standard variables."""
    limits = SpanLimits(max_links=_limit("OTEL_SPAN_LINK_COUNT_LIMIT", MAX_LINKS))
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False, span_limits=limits)
    provider.sampler = LinkedSampler(provider.sampler)
    return provider


def make_tracer(provider: TracerProvider) -> Tracer:
    """Make the tracer for this project's spans."""
    return provider.get_tracer(SCOPE, __version__, SCHEMA_URL)


def _otlp_exporter(protocol: OtlpProtocol) -> SpanExporter:
    compression = otlp_compression(os.environ)
    # Either library takes a while to load, and a service needs one of them at most.
    if protocol == "grpc":
        from grpc import Compression as GrpcCompression
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        known = {
            "none": GrpcCompression.NoCompression,
            "gzip": GrpcCompression.Gzip,
            "deflate": GrpcCompression.Deflate,
        }
        return GrpcExporter(compression=known[compression])
    from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(compression=HttpCompression(compression))


def _limit(variable: str, default: int) -> int | None:
    """Return a limit that differs from the SDK's default; None where the variable is set, for the SDK reads it."""
    return None if os.environ.get(variable) else default


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
    own = {"service.instance.id": str(uuid.uuid4()), "service.version": __version__}
    # The standard variables win over these, and these over the SDK's own.
    resource = Resource(own).merge(Resource.create())
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": f"paceline-{service.removesuffix('_service')}"}))
    return HashedResource(resource)
