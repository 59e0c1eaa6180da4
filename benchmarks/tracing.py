"""Cost of tracing: the built-in pair with all requests traced, by each exporter, and with none traced.

python -m benchmarks.tracing

Each exporter has one cluster, asked in turn by a caller that samples and by one that does not, because two clusters of
the same options differ by up to 4 % for as long as they run. Shown are medians, and the tokens for a second of
processor time of all services, which other work of the machine affects least. Losses are medians over pairs of
neighbouring runs, which it affects alike. Calls that remain when tracing is off cost too little for this: they are
timed alone and compared with the time of a round.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import grpc
import psutil
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.processes import environment
from coordinator.door.tracer import TOLD_WITHIN_S, RequestTracer, begin_request
from coordinator.requests.generation import Generation, Request
from coordinator.requests.output import Output, StopRules
from coordinator.rounds.tracer import RoundTracer
from paceline.cli.prompts import PROMPTS
from paceline.client import Client
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.launcher import running_cluster
from paceline.types import GenerationRequest, Usage, UserMessage
from paceline.wire import running_server

console = Console(highlight=False)

ROUNDS_OFF = 20_000
UNSAMPLED = trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))
"""Span inside which requests are not sampled."""
EXPORTED_WITHIN_S = TOLD_WITHIN_S + 6.0
"""Seconds until a run's spans are made and exported: the SDK's exporters send every 5 s, or 512 spans."""
TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@asynccontextmanager
async def _grpc_sink() -> AsyncIterator[str]:
    """Drop spans unread, because a collector's own work is no cost of the services. Yield its URL."""

    async def drop(request: bytes, context: Any) -> bytes:
        return ExportTraceServiceResponse().SerializeToString()

    def add(server: grpc.aio.Server) -> None:
        handlers: Any = {"Export": grpc.unary_unary_rpc_method_handler(drop)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TRACE_SERVICE, handlers),))

    async with running_server("127.0.0.1", 0, [], add, grace_s=1) as server:
        yield f"http://{server.address}"


@asynccontextmanager
async def _http_sink() -> AsyncIterator[str]:
    """Drop spans unread, as `_grpc_sink` does."""

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(drop, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


SINKS = {"grpc": _grpc_sink, "http/protobuf": _http_sink}
EXPORTERS = ("file", *SINKS)


def main(runs: int = 9, batch_size: int = 8, max_new_tokens: int = 160, exporters: str = ",".join(EXPORTERS)) -> None:
    console.print_json(json.dumps(asyncio.run(_measure(runs, batch_size, max_new_tokens, exporters.split(",")))))


async def _measure(runs: int, batch_size: int, max_new_tokens: int, exporters: list[str]) -> dict[str, object]:
    results: dict[str, object] = {}
    for exporter in exporters:
        async with _cluster(exporter, batch_size) as cluster:
            results[exporter] = await _compare(cluster, runs, max_new_tokens)
            statistics = (await cluster.client.describe()).statistics
    round_s = statistics.round_s / statistics.round_count
    off_s = _off_s_per_round(batch_size)
    return {
        "batch_size": batch_size,
        **results,
        "round_ms": round(1e3 * round_s, 2),
        "off_us_per_round": round(1e6 * off_s, 2),
        "lost_when_off": round(off_s / round_s, 6),
    }


async def _compare(cluster: "Cluster", runs: int, max_new_tokens: int) -> dict[str, object]:
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu_rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(runs + 1):  # the first of each warms up
        # The two take turns in going first, so that neither always follows the other.
        for is_traced in (True, False) if number % 2 else (False, True):
            before_s = cluster.cpu_s()
            with nullcontext() if is_traced else trace.use_span(UNSAMPLED):
                token_count, elapsed_s = await _run(cluster.client, max_new_tokens)
            await asyncio.sleep(EXPORTED_WITHIN_S)  # late exports are part of the run's cost
            rates[is_traced].append(token_count / elapsed_s)
            cpu_rates[is_traced].append(token_count / (cluster.cpu_s() - before_s))
    return {"tokens_per_s": _compared(rates), "tokens_per_processor_s": _compared(cpu_rates)}


def _compared(rates: dict[bool, list[float]]) -> dict[str, float]:
    on, off = rates[True][1:], rates[False][1:]
    lost = median(1 - one / other for one, other in zip(on, off, strict=True))
    return {"traced": round(median(on)), "not": round(median(off)), "lost": round(lost, 4)}


@dataclass(frozen=True)
class Cluster:
    client: Client
    services: list[psutil.Process]

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self.services]
        return sum(one.user + one.system for one in times)


@asynccontextmanager
async def _cluster(exporter: str, batch_size: int) -> AsyncIterator[Cluster]:
    """Start services whose spans go to `exporter`."""
    async with AsyncExitStack() as stack:
        variables = {"OTEL_TRACES_EXPORTER": "none"}
        if exporter in SINKS:
            variables["OTEL_TRACES_EXPORTER"] = "otlp"
            variables["OTEL_EXPORTER_OTLP_PROTOCOL"] = exporter
            variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = await stack.enter_async_context(SINKS[exporter]())
        trace_dir = stack.enter_context(tempfile.TemporaryDirectory()) if exporter == "file" else None
        others = {process.pid for process in psutil.Process().children()}
        with environment(variables):
            addresses = await stack.enter_async_context(
                running_cluster(ClusterOptions(batch_size=batch_size, prefix_sharing=False, trace_dir=trace_dir))
            )
        own = [process for process in psutil.Process().children() if process.pid not in others]
        yield Cluster(await stack.enter_async_context(Client(addresses.coordinator, tracer=trace.NoOpTracer())), own)


async def _run(client: Client, max_new_tokens: int) -> tuple[int, float]:
    """Answer all prompts at once, each four times; return the number of tokens and the seconds.

    That is long enough for two or three exports of each service.
    """
    began = time.perf_counter()
    requests = [GenerationRequest(UserMessage(prompt), max_new_tokens=max_new_tokens) for prompt in 4 * PROMPTS]
    completions = await asyncio.gather(*map(client.complete, requests))
    return sum(len(one.tokens) for one in completions), time.perf_counter() - began


def _off_s_per_round(batch_size: int) -> float:
    """Return the seconds that tracing, when off, costs a round and the begin and end of its group's requests.

    In the model services and the channels only the test of a variable a call remains.
    """
    output = Output(StopRules(max_new_tokens=9, end_token_ids=frozenset()), None)
    group = [Generation(str(number), [1], output, 64, Usage(1), Request()) for number in range(batch_size)]
    asked = GenerationRequest(UserMessage(""))
    waits_s, counts = [0.0] * batch_size, [5] * batch_size
    tracer, of_requests = RoundTracer(None, "continuous"), RequestTracer(None, ThreadPoolExecutor())
    began = time.perf_counter()
    for _ in range(ROUNDS_OFF):
        with tracer.round(group, waits_s, counts, 0):
            pass
        for generation in group:
            begin_request(asked, generation.request, "")
            of_requests.end(generation.request, None, None)
    return (time.perf_counter() - began) / ROUNDS_OFF


if __name__ == "__main__":
    run_command(main)
