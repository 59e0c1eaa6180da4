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
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.util.types import AttributeValue

from coordinator.requests.generation import Generation, Request
from coordinator.requests.output import Output, StopRules
from coordinator.requests.traced_request import TracedRequest
from coordinator.rounds.round import RoundReport
from coordinator.rounds.tracer import RoundTracer
from paceline.client import Client
from paceline.codec.generation import request_to_pb
from paceline.errors import StartupError
from paceline.observe.records import read_spans
from paceline.observe.report.receiver import Receiver, add_receiver, running_receiver
from paceline.observe.spans.lean import LeanTracer
from paceline.observe.spans.provider import MAX_LINKS
from paceline.observe.spans.setup import tracing
from paceline.types import GenerationRequest, HopTime, TokenIds, Usage
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from paceline.wire import open_channel, running_server
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.spans import Spans, until
from tests.trees import tree_of


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
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_a_variable_that_asks_for_what_there_is_not_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=f"{variable} is '{value}'"), tracing("coordinator", None):
        pass


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


async def test_a_request_for_two_outputs_has_one_span_and_links_for_each(pairs: dict[str, PairOfCheckpoints]) -> None:
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
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    rounds = spans("round")
    assert {link.span_id for link in server.links} == {one.span_id for one in rounds}
    assert sum(sum(one.attributes["paceline.request.committed_count"]) for one in rounds) == 40
    # One round may serve both outputs; it links its request once for each.
    outputs = [one.attributes.get("paceline.request.completion_index", [0] * len(one.links)) for one in rounds]
    assert {index for indexes in outputs for index in indexes} == {0, 1}


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
    assert len(spans("round")) == len(tree.rounds) > 0


async def test_what_a_caller_does_not_sample_leaves_no_span_though_others_do(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, PairOfCheckpoints]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    spans = await generate_twice(pairs["Llama"], "00")
    (request,) = spans("generate")
    assert request.trace_id != f"{7:032x}"
    assert len(spans("round")) == len(request.links) > 0


def member(baggage_items: dict[str, str], span_id: int) -> Generation:
    output = Output(StopRules(max_new_tokens=9, end_token_ids=frozenset()), None)
    context = set_span_in_context(trace.NonRecordingSpan(SpanContext(1, span_id, False, TraceFlags(1))))
    for name, value in baggage_items.items():
        context = baggage.set_baggage(name, value, context)
    return Generation(str(span_id), [1], output, 64, Usage(1), Request(traced=TracedRequest.of(context)))


async def test_a_round_carries_the_baggage_that_its_members_share() -> None:
    spans = Spans()
    group = [member({"tenant": "blue", "user": "1"}, 11), member({"tenant": "blue", "user": "2"}, 12)]
    with RoundTracer(spans.tracer, "continuous").round(group, [0.0, 0.0], [3, 4], 1):
        assert baggage.get_all() == {"tenant": "blue"}
    assert baggage.get_all() == {}
    (span,) = spans("round")
    assert [link.span_id for link in span.links] == [f"{11:016x}", f"{12:016x}"]
    assert dict(span.attributes) == {
        "paceline.group_size": 2,
        "paceline.draft_count": 4,
        "paceline.lane": 1,
        "paceline.policy": "continuous",
        "paceline.request.waited_s": [0.0, 0.0],
    }


async def test_a_request_links_a_round_once_however_many_of_its_outputs_it_served() -> None:
    one, other, stranger = member({}, 11), member({}, 11), member({}, 12)
    other.request = one.request
    tracer = RoundTracer(Spans().tracer, "continuous")
    report = RoundReport([], 0.0, HopTime(), HopTime(), 0, None, None)
    for _ in range(2):
        with tracer.round([one, stranger, other], [0.0, 0.0, 0.0], [1, 1, 1], 0) as record:
            record(report)
    assert one.request.traced and stranger.request.traced
    assert len(one.request.traced.rounds) == 2
    assert one.request.traced.rounds == stranger.request.traced.rounds


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


async def answers(pair: PairOfCheckpoints, tracer: LeanTracer | None) -> list[list[int]]:
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


async def test_a_request_keeps_a_link_to_each_of_many_rounds() -> None:
    spans = Spans()
    with spans.tracer.start_as_current_span("generate") as request:
        for number in range(MAX_LINKS):
            request.add_link(SpanContext(1, number + 1, False))
    assert len(spans("generate")[0].links) == MAX_LINKS


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
