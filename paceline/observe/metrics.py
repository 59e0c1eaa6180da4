"""The shared part of the services' metrics: registry, buckets, HTTP port, and what every service tells of itself.

Owns how metrics are kept and served, and the metrics that all services have. Each service makes its own registry and
hands it down. `docs/metrics.md` says what the numbers mean.

The label that tells the services apart is `component`: Prometheus itself sets `service` on what a ServiceMonitor finds.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline import __version__
from paceline.codec.rounds import is_unasked
from paceline.codec.versions import VERSION
from paceline.observe.logs import SpanIds, active_span
from paceline.security.access import Context
from paceline.security.certificates import Certificates, end_times_s
from paceline.types import ModelDescription
from paceline.wire import Handler, WrappingInterceptor, tell_end, wrap
from paceline.wire.ports import Listening, host_port

ROUND_BUCKETS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096),
    *(0.128, 0.192, 0.256, 0.384, 0.512, 0.768, 1.0, 1.5, 2.5, 5.0, 10.0),
)
"""Seconds, for rounds and their parts, which take 1 ms to 1 s: a pass of a large target takes 100 ms, and a call may
have several. In that range the steps are a third to a half."""
REQUEST_BUCKETS_S = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.35,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.5,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    300.0,
    600.0,
    1200.0,
)
"""Seconds, for requests. Gateways give an answer ten minutes."""
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

USUAL_CODES = (
    *(grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED),
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION),
    *(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE),
)
"""Codes that have series before any call ended with them: a rate misses the step from nothing to one."""

Exemplar = dict[str, str] | None


def exemplar_of(span: SpanIds | None) -> Exemplar:
    """Return the exemplar that links an observation to the trace of a span; None without a span."""
    return {"trace_id": span.trace_id} if span else None


def active_exemplar() -> Exemplar:
    """Return the exemplar of the active span; None when no sampled span is active."""
    return exemplar_of(active_span())


class Registry(CollectorRegistry):
    """A registry without the series `_created`, which would double those of counters and say what rates know anyway."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield metric


def new_registry(component: str) -> CollectorRegistry:
    """Make the registry of a service, with metrics of its process and its build."""
    registry = Registry()
    ProcessCollector(registry=registry)
    started = Gauge(
        "paceline_start_time_seconds", "When the service started, in Unix time.", ["component"], registry=registry
    )
    started.labels(component).set(time.time())
    build = Gauge(
        "paceline_build_info",
        "Always 1; its labels name the build.",
        ["component", "version", "wire_version"],
        registry=registry,
    )
    build.labels(component, __version__, VERSION).set(1)
    return registry


def count_tasks(registry: CollectorRegistry, component: str) -> None:
    """Register a gauge of the running loop's tasks. Growth while the service is idle shows leaked tasks."""
    loop = asyncio.get_running_loop()
    tasks = Gauge("paceline_tasks", "Tasks of the event loop.", ["component"], registry=registry)
    tasks.labels(component).set_function(lambda: len(asyncio.all_tasks(loop)))


def model_info(component: str, model: ModelDescription | None) -> Metric:
    """Return the metric that names a service's model. All names are empty while there is none."""
    names = {
        "model": model.model_id if model else "",
        "digest": model.identity.model_digest if model else "",
        "dtype": model.dtype if model else "",
        "quantization": model.quantization if model else "",
        "device": model.device if model else "",
        "layout": model.cache.layout if model else "",
        "numerics": model.numerics if model else "",
    }
    info = GaugeMetricFamily(
        "paceline_model_info", "Always 1; its labels name the model.", labels=["component", *names]
    )
    info.add_metric([component, *names.values()], 1)
    return info


class CertificateCollector(Collector):
    """Tells when the certificates end that are in use at the moment of the scrape."""

    def __init__(
        self,
        component: str,
        served: Certificates | None,
        models: Certificates | None = None,
        coordinators: Certificates | None = None,
    ) -> None:
        """`served` are those of the service's own port, the others those for its calls to such services."""
        self._component = component
        self._served = served
        self._models = models
        self._coordinators = coordinators

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "paceline_certificate_not_after_seconds",
            "When a certificate in use ends, in Unix time.",
            labels=["component", "setting"],
        )
        for setting, end_s in self._ends():
            family.add_metric([self._component, setting], end_s)
        yield family

    def _ends(self) -> Iterator[tuple[str, float]]:
        served = self._served.value() if self._served else None
        models = self._models.value() if self._models else None
        coordinators = self._coordinators.value() if self._coordinators else None
        # A chain holds until its first certificate ends. Of several CAs one is enough: an old and a new one stand side
        # by side during a rotation.
        for setting, pem, end_of in (
            ("tls_certificate", served and served.certificate, min),
            ("tls_client_ca", served and served.ca, max),
            ("models_ca", models and models.ca, max),
            ("coordinator_ca", coordinators and coordinators.ca, max),
            ("coordinator_certificate", coordinators and coordinators.certificate, min),
        ):
            if times_s := end_times_s(pem) if pem else []:
                yield setting, end_of(times_s)


@contextmanager
def metrics_served(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[str | None]:
    """Serve the registry over HTTP from a separate thread while the block runs; yield the URL.

    Without a port, serve nothing and yield None. Raise AddressInUse or StartupError.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, host.strip("[]"), registry)
    except OSError as error:
        raise Listening("--metrics-port", host, port).refused(error) from error
    try:
        yield f"http://{host_port(host, server.server_port)}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class CallCounter(WrappingInterceptor):
    """Counts a service's calls by method and status."""

    def __init__(self, registry: CollectorRegistry, component: str) -> None:
        self._component = component
        self._calls = Counter(
            "paceline_rpc_calls", "Calls that ended.", ["component", "method", "code"], registry=registry
        )
        self._methods: set[str] = set()
        """Methods that were called."""

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method not in self._methods:
            self._methods.add(method)
            for code in USUAL_CODES:
                self._calls.labels(self._component, method, code.name)
        counted_stream = self._counted_exchange if handler.request_streaming else self._counted_stream
        return wrap(
            handler,
            unary=lambda behavior: self._counted_unary(behavior, method),
            stream=lambda behavior: counted_stream(behavior, method),
        )

    def _counted_unary(self, behavior: Handler, method: str) -> Handler:
        async def counted(request: Any, context: Context) -> Any:
            self._count_at_end(method, context)
            return await behavior(request, context)

        return counted

    def _counted_stream(self, behavior: Handler, method: str) -> Handler:
        async def counted(request: Any, context: Context) -> AsyncIterator[Any]:
            self._count_at_end(method, context)
            async for response in behavior(request, context):
                yield response

        return counted

    def _counted_exchange(self, behavior: Handler, method: str) -> Handler:
        """Count every request as a call. The cancellation of a stream without a request in progress is no failure.

        What is sent unasked answers no request.
        """

        async def counted(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            in_work = 0

            async def seen() -> AsyncIterator[Any]:
                nonlocal in_work
                async for request in requests:
                    in_work += 1
                    yield request

            def ended(code: grpc.StatusCode) -> None:
                if in_work or code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
                    self._count(method, code)

            tell_end(context, None, ended)
            async for response in behavior(seen(), context):
                if not is_unasked(response):
                    in_work -= 1
                    self._count(method, grpc.StatusCode.OK)
                yield response

        return counted

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._calls.labels(self._component, method, code.name).inc()

    def _count_at_end(self, method: str, context: Context) -> None:
        tell_end(context, context.time_remaining(), partial(self._count, method))
