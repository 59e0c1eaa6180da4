"""The shared part of the services' metrics: registry, buckets, HTTP port and the counting of calls.

Owns how metrics are kept and served; knows nothing of their meaning. Each service makes its own registry and hands it
down.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server

from paceline.observe.logs import SpanIds, active_span
from paceline.wire import Handler, WrappingInterceptor, ended_code, wrap
from paceline.wire.ports import Listening

ROUND_BUCKETS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096),
    *(0.128, 0.192, 0.256, 0.512, 1.0, 2.5, 10.0),
)
"""Seconds, for rounds and their parts, which take 1 to 100 ms. In that range the steps are a third to a half."""
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
)
ROW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Context = grpc.aio.ServicerContext[Any, Any]
Exemplar = dict[str, str] | None


def exemplar_of(span: SpanIds | None) -> Exemplar:
    """Return the exemplar that links an observation to the trace of a span; None without a span."""
    return {"trace_id": span.trace_id} if span else None


def active_exemplar() -> Exemplar:
    """Return the exemplar of the active span; None when no sampled span is active."""
    return exemplar_of(active_span())


def new_registry(service: str) -> CollectorRegistry:
    """Make the registry of a service, with metrics of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    started = Gauge(
        "paceline_start_time_seconds", "When the service started, in Unix time.", ["service"], registry=registry
    )
    started.labels(service).set(time.time())
    return registry


def count_tasks(registry: CollectorRegistry, service: str) -> None:
    """Register a gauge of the running loop's tasks. Growth while the service is idle shows leaked tasks."""
    loop = asyncio.get_running_loop()
    tasks = Gauge("paceline_tasks", "Tasks of the event loop.", ["service"], registry=registry)
    tasks.labels(service).set_function(lambda: len(asyncio.all_tasks(loop)))


@contextmanager
def metrics_served(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[str | None]:
    """Serve the registry over HTTP from a separate thread while the block runs; yield the URL.

    Without a port, serve nothing and yield None. Raise AddressInUse or StartupError.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Listening("--metrics-port", host, port).refused(error) from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class CallCounter(WrappingInterceptor):
    """Counts a service's calls by method and status."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._service = service
        self._calls = Counter(
            "paceline_rpc_calls", "Calls that ended.", ["service", "method", "code"], registry=registry
        )

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
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
        """Count every request as a call. The cancellation of a stream without a request in progress is no failure."""

        async def counted(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            in_work = 0

            async def seen() -> AsyncIterator[Any]:
                nonlocal in_work
                async for request in requests:
                    in_work += 1
                    yield request

            def ended(_: object) -> None:
                code = ended_code(context, None)
                if in_work or code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
                    self._count(method, code)

            context.add_done_callback(ended)  # type: ignore[arg-type]
            async for response in behavior(seen(), context):
                in_work -= 1
                self._count(method, grpc.StatusCode.OK)
                yield response

        return counted

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._calls.labels(self._service, method, code.name).inc()

    def _count_at_end(self, method: str, context: Context) -> None:
        timeout_s = context.time_remaining()

        def count(_: object) -> None:
            self._count(method, ended_code(context, timeout_s))

        context.add_done_callback(count)  # type: ignore[arg-type]
