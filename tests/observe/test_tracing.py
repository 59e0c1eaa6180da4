"""Tracing turned on and off, sampling, and exporters that do not work."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.trace import SpanContext, TraceFlags, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.util.types import AttributeValue

from coordinator.requests.generation import Generation, Request
from coordinator.requests.traced_request import TracedRequest
from coordinator.rounds.round_report import RoundReport
from coordinator.rounds.tracer import RoundTracer
from paceline.client import Client
from paceline.codec.generation import request_to_pb
from paceline.errors import StartupError
from paceline.observe.records import read_spans
from paceline.observe.report.receiver import Receiver, add_receiver, running_receiver
from paceline.observe.spans.protocols import COMPRESSIONS, PROTOCOLS
from paceline.observe.spans.provider import MAX_LINKS
from paceline.observe.spans.setup import tracing
from paceline.types import GenerationRequest, HopTime, TokenIds
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel, running_server
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.generations import generation_of
from tests.spans import Spans
from tests.trees import tree_of
from tests.waits import until


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def test_tracing_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tracing("coordinator", None) as tracer:
        assert tracer is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    with tracing("coordinator", None) as tracer:
        assert tracer is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with tracing("coordinator", tmp_path / "spans.jsonl") as tracer:
        assert tracer is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zstd"),
    ],
)
def test_a_variable_that_asks_for_what_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=f"{variable} is '{value}'"), tracing("coordinator", None):
        pass


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("compression", [*COMPRESSIONS, "GZIP", ""])
def test_each_compression_that_the_page_names_is_known_to_either_exporter(
    monkeypatch: pytest.MonkeyPatch, protocol: str, compression: str
) -> None:
    """That of gRPC ended the service by a traceback for all but gzip."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    with tracing("coordinator", None) as tracer:
        assert tracer


@pytest.mark.review
@pytest.mark.parametrize("exporter", ["none", "otlp"])
def test_the_protocol_of_what_is_not_sent_ends_no_service(monkeypatch: pytest.MonkeyPatch, exporter: str) -> None:
    """review D6"""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    if exporter == "otlp":
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with tracing("coordinator", None) as tracer:
        assert tracer is None


@pytest.mark.parametrize("variable", ["OTEL_SPAN_LINK_COUNT_LIMIT", "OTEL_EXPORTER_OTLP_TIMEOUT"])
def test_a_number_that_is_none_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv(variable, "many")
    with pytest.raises(StartupError, match="OTEL_ variables is wrong: .*many"), tracing("coordinator", None):
        pass


def test_a_trace_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="missing/spans.jsonl"), tracing("x", tmp_path / "missing" / "spans.jsonl"):
        pass


def test_spans_in_a_file_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    path = tmp_path / "spans.jsonl"
    with tracing("draft_service", path) as tracer:
        assert tracer
        other = tracer.start_span("other")
        link = trace.Link(other.get_span_context(), {"paceline.waited_s": 0.5})
        with tracer.start_as_current_span("parent", links=[link], attributes={"a": 1, "b": ["x", "y"]}):
            tracer.start_span("child").end()
    child, parent = read_spans([str(tmp_path / "*.jsonl")])
    assert (child.name, child.parent_id, child.trace_id) == ("child", parent.span_id, parent.trace_id)
    assert (parent.service, parent.kind, parent.parent_id) == ("paceline-draft", "internal", None)
    assert dict(parent.attributes) == {"a": 1, "b": ["x", "y"]}
    assert [(one.span_id, one.attributes) for one in parent.links] == [
        (f"{other.get_span_context().span_id:016x}", {"paceline.waited_s": 0.5})
    ]
    assert child.instance == parent.instance != ""
    assert child.duration_s >= 0


def test_a_service_has_the_name_that_the_environment_gives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with tracing("draft_service", tmp_path / "spans.jsonl") as tracer:
        assert tracer
        tracer.start_span("one").end()
    assert [one.service for one in read_spans([str(tmp_path / "spans.jsonl")])] == ["mine"]


async def test_each_of_two_outputs_has_its_queue_and_its_rounds_in_the_trace(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    spans, pair = Spans(), pairs["Llama"]
    asked = GenerationRequest(TokenIds((5, 6, 7)), 20, ignore_end_tokens=True, completion_count=2)
    async with (
        cluster(pair.target, pair.draft, tracer=spans.tracer) as served,
        Client(served.coordinator_address, tracer=spans.tracer) as client,
    ):
        await client.complete(asked)
        server = await spans.one("generate", "server")
    (called,) = spans("generate", "client")
    assert server.parent_id == called.span_id
    assert server.attributes["gen_ai.usage.output_tokens"] == 40
    assert server.attributes["gen_ai.request.choice.count"] == 2
    assert list(server.attributes["gen_ai.response.finish_reasons"]) == ["length", "length"]
    finishes = [one.attributes for one in server.events if one.name == "finish"]
    assert sorted(one["paceline.completion_index"] for one in finishes) == [0, 1]
    children = [one for one in spans() if one.parent_id == server.span_id]
    for index in (0, 1):
        own = [one for one in children if one.attributes["paceline.completion_index"] == index]
        assert min(own, key=lambda one: one.start_ns).name == "queue"
        accepted_count = sum(one.attributes.get("paceline.accepted_count", 0) for one in own)
        assert accepted_count + len(own) - 1 >= 20
    # One round may serve both outputs; it links their request once.
    assert all(len(one.links) == 1 for one in spans("shared_round"))


async def generate_twice(pair: PairOfCheckpoints, flags: str) -> Spans:
    """Send a request with these flags in trace 7, then one without a context."""
    spans = Spans()
    asked = request_to_pb(GenerationRequest(TokenIds((5, 6, 7)), 6, ignore_end_tokens=True))
    async with (
        cluster(pair.target, pair.draft, tracer=spans.tracer) as served,
        open_channel(served.coordinator_address) as channel,
    ):
        for metadata in ((("traceparent", f"00-{7:032x}-{8:016x}-{flags}"),), ()):
            async for _ in GenerationServiceStub(channel).GenerateText(asked, metadata=metadata):
                pass
    return spans


async def test_rounds_follow_the_decision_of_their_requests_callers(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, PairOfCheckpoints]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    spans = await generate_twice(pairs["Llama"], "01")
    tree = tree_of(spans(), f"{7:032x}")
    assert tree.request.parent_id == f"{8:016x}"
    assert len(spans("generate")) == 1
    assert len(spans("shared_round")) == len(tree.shared) == len(tree.rounds) > 0


async def test_what_a_caller_does_not_sample_leaves_no_span_though_others_do(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, PairOfCheckpoints]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    spans = await generate_twice(pairs["Llama"], "00")
    (request,) = spans("generate")
    assert request.trace_id != f"{7:032x}"
    assert len(spans("shared_round")) == len(tree_of(spans(), request.trace_id).rounds) > 0


def member(baggage_items: dict[str, str], span_id: int) -> Generation:
    context = set_span_in_context(trace.NonRecordingSpan(SpanContext(1, span_id, False, TraceFlags(1))))
    for name, value in baggage_items.items():
        context = baggage.set_baggage(name, value, context)
    return generation_of(name=str(span_id), request=Request(traced=TracedRequest.of(context)))


async def test_a_round_carries_the_baggage_that_its_members_share() -> None:
    spans = Spans()
    group = [member({"tenant": "blue", "user": "1"}, 11), member({"tenant": "blue", "user": "2"}, 12)]
    with RoundTracer(spans.tracer, "continuous").round(group, [0.0, 0.0], [3, 4], 1):
        assert baggage.get_all() == {"tenant": "blue"}
    assert baggage.get_all() == {}
    (span,) = spans("shared_round")
    assert [link.span_id for link in span.links] == [f"{11:016x}", f"{12:016x}"]
    assert dict(span.attributes) == {
        "paceline.group_size": 2,
        "paceline.draft_count": 4,
        "paceline.lane": 1,
        "paceline.policy": "continuous",
    }


async def test_a_round_links_a_request_once_however_many_of_its_outputs_it_serves() -> None:
    spans, one, other, stranger = Spans(), member({}, 11), member({}, 11), member({}, 12)
    other.request, other.completion_index = one.request, 1
    report = RoundReport([], 0.0, HopTime(), HopTime(), None, None)
    with RoundTracer(spans.tracer, "continuous").round([one, stranger, other], [0.0] * 3, [1] * 3, 0) as record:
        record(report)
    (shared,) = spans("shared_round")
    assert [link.span_id for link in shared.links] == [f"{11:016x}", f"{12:016x}"]
    assert one.request.traced and stranger.request.traced
    assert [noted.completion_index for noted in one.request.traced.rounds] == [0, 1]
    assert len(stranger.request.traced.rounds) == 1


class DeadCollector(Receiver):
    """Accepts calls and never answers them."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.over = asyncio.Event(), asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:
        self.called.set()
        await self.over.wait()
        return await super().Export(request, context)


@contextlib.asynccontextmanager
async def dead_collector() -> AsyncIterator[DeadCollector]:
    collector = DeadCollector()
    async with running_server("127.0.0.1", 0, [], lambda server: add_receiver(collector, server), grace_s=0) as server:
        collector.address = server.address
        yield collector
        collector.over.set()


async def answers(pair: PairOfCheckpoints, tracer: Tracer | None) -> list[list[int]]:
    async with cluster(pair.target, pair.draft, tracer=tracer) as served:
        asked = [GenerationRequest(TokenIds((5, 6, n)), 12, ignore_end_tokens=True) for n in range(4)]
        return [one.token_ids for one in await asyncio.gather(*map(served.client.complete, asked))]


def exporting_threads() -> list[str]:
    """Return the SDK's threads still at work: none may be after tracing ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Otel")]


async def test_a_collector_that_never_answers_holds_up_no_call(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, PairOfCheckpoints]
) -> None:
    expected = await answers(pairs["Llama"], None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    async with dead_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        with tracing("test", None) as tracer:
            # All of these calls end while the first export hangs and the queue of spans overflows.
            assert await answers(pairs["Llama"], tracer) == expected
            await collector.called.wait()
            assert await answers(pairs["Llama"], tracer) == expected
            assert collector.spans == []
        assert exporting_threads() == []


async def test_a_collector_that_is_not_there_costs_spans_only(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, PairOfCheckpoints]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        with tracing("test", None) as tracer:
            assert await answers(pairs["Llama"], tracer) == await answers(pairs["Llama"], None)
    assert exporting_threads() == []


async def test_a_trace_file_that_can_take_no_more_costs_spans_only(pairs: dict[str, PairOfCheckpoints]) -> None:
    with tracing("test", Path("/dev/full")) as tracer:
        assert await answers(pairs["Llama"], tracer) == await answers(pairs["Llama"], None)


async def test_a_shared_round_keeps_a_link_to_each_of_many_requests() -> None:
    spans = Spans()
    links = [trace.Link(SpanContext(1, number + 1, False)) for number in range(MAX_LINKS)]
    spans.tracer.start_span("shared_round", links=links).end()
    assert len(spans("shared_round")[0].links) == MAX_LINKS


async def test_a_receiver_gets_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_receiver("127.0.0.1", 0) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")

        def send() -> None:
            with tracing("target_service", None) as tracer:
                assert tracer
                attributes: dict[str, AttributeValue] = {"a": 1, "b": 0.5, "c": ("x", "y"), "d": True}
                with tracer.start_as_current_span("parent", attributes=attributes, kind=trace.SpanKind.CLIENT) as span:
                    span.set_status(trace.StatusCode.ERROR)
                    tracer.start_span("child", links=[trace.Link(SpanContext(1, 2, True), {"e": "z"})]).end()

        await asyncio.to_thread(send)
        await until(lambda: len(receiver.spans) == 2)
    child, parent = receiver.spans
    assert dict(parent.attributes) == {"a": 1, "b": 0.5, "c": ["x", "y"], "d": True}
    assert (parent.kind, parent.is_error, parent.parent_id, parent.service) == ("client", True, None, "paceline-target")
    assert (child.kind, child.is_error, child.parent_id) == ("internal", False, parent.span_id)
    (link,) = child.links
    assert (link.trace_id, link.span_id, link.attributes) == (f"{1:032x}", f"{2:016x}", {"e": "z"})
