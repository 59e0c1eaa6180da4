"""The SDK as it is put together: what plugins find, what the standard variables set, and who is told to be sending."""

import importlib.metadata
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, TraceFlags

from paceline.observe.records import SpanRecord, read_spans, to_line
from paceline.observe.report.receiver import records_of
from paceline.observe.spans import provider
from paceline.observe.spans.file_exporter import BEGINNING, FileExporter
from paceline.observe.spans.provider import SCHEMA_URL, make_provider, make_tracer
from paceline.observe.spans.setup import tracing
from tests.commands import python_code
from tests.spans import Spans

PLUGIN = """
import os
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from paceline.observe.spans.setup import tracing

class Tenant(SpanProcessor):
    def on_start(self, span, parent_context=None):
        span.set_attribute("tenant", "blue")

if os.environ["EARLIER"]:
    trace.set_tracer_provider(TracerProvider())
with tracing("coordinator", Path(os.devnull)) as tracer:
    trace.get_tracer_provider().add_span_processor(Tenant())
    with tracer.start_as_current_span("generate") as span:
        print(dict(span.attributes))
    with trace.get_tracer("of a library").start_as_current_span("its own") as span:
        print(dict(span.attributes), span.resource.attributes["service.name"])
"""


@pytest.mark.review
def test_a_plugin_finds_the_provider_and_acts_on_each_start() -> None:
    """review E3"""
    status, out, err = python_code(PLUGIN, EARLIER="")
    assert status == 0, err
    assert out.splitlines() == ["{'tenant': 'blue'}", "{'tenant': 'blue'} paceline-coordinator"]


def test_a_provider_that_is_there_already_stays_the_global_one() -> None:
    status, out, err = python_code(PLUGIN, EARLIER="yes")
    assert status == 0, err
    assert out.splitlines() == ["{}", "{'tenant': 'blue'} unknown_service:python"]
    assert not err


def exported(name: str) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    provider = make_provider("coordinator")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make_tracer(provider).start_span(name).end()
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.review
def test_spans_name_the_version_of_what_made_them() -> None:
    """review E3 and E4"""
    span, version = exported("one"), importlib.metadata.version("paceline")
    assert span.instrumentation_scope
    scope = span.instrumentation_scope
    assert (scope.name, scope.version, scope.schema_url) == ("paceline", version, SCHEMA_URL)
    assert span.resource.attributes["service.version"] == version


def test_the_standard_variables_win_over_our_own_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=theirs,service.instance.id=pod-3")
    attributes = exported("one").resource.attributes
    assert (attributes["service.version"], attributes["service.instance.id"]) == ("theirs", "pod-3")


def test_limits_of_the_standard_variables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    spans = Spans()
    links = [Link(SpanContext(number, number, False)) for number in range(1, 4)]
    spans.tracer.start_span("one", attributes={"a": "long text", "b": "c", "d": "text"}, links=links).end()
    (record,) = spans("one")
    assert record.attributes == {"b": "c", "d": "tex"}
    assert [link.span_id for link in record.links] == [f"{2:016x}", f"{3:016x}"]


SAMPLED = SpanContext(7, 8, True, TraceFlags(TraceFlags.SAMPLED))


@pytest.mark.parametrize("sampler", ["always_off", "parentbased_always_off", "traceidratio"])
def test_a_root_that_links_a_sampled_span_is_sampled_with_all_inside_it(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    spans = Spans()
    with spans.tracer.start_as_current_span("shared_round", links=[Link(SAMPLED)]):
        spans.tracer.start_span("target.verify").end()
    spans.tracer.start_span("by itself").end()
    assert [one.name for one in spans()] == ["target.verify", "shared_round"]


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP. Until `may_answer` is set it answers nothing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[SpanRecord] = []
        self.paths: set[str] = set()
        self.called, self.may_answer = Event(), Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.called.set()
        self.server.may_answer.wait()
        self.server.paths.add(self.path)
        self.server.spans += records_of(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        yield server
        server.may_answer.set()
        server.shutdown()
        serving.join()


@pytest.mark.review
@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_spans_go_over_http_where_the_variables_say_so(
    collector: Collector, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review D6"""
    monkeypatch.setenv(variable, "http/protobuf")
    collector.may_answer.set()
    with tracing("target_service", None) as tracer:
        assert tracer
        tracer.start_span("execute", attributes={"a": 1}).end()
    (span,) = collector.spans
    assert (span.name, span.service, dict(span.attributes)) == ("execute", "paceline-target", {"a": 1})
    assert collector.paths == {"/v1/traces"}


def test_the_protocol_of_traces_wins_over_that_of_all(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector.may_answer.set()
    with tracing("target_service", None) as tracer:
        assert tracer
        tracer.start_span("one").end()
    assert [one.name for one in collector.spans] == ["one"]


def test_the_spans_of_many_requests_that_end_together_are_all_sent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first export holds the others up while the spans of 20 requests gather, twice what the SDK keeps."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    count = 20 * 256
    with tracing("coordinator", None) as tracer:
        assert tracer
        for number in range(count):
            tracer.start_span("round", attributes={"number": number}).end()
        collector.may_answer.set()
        # A queue that is full drops its oldest spans.
        while not any(one.attributes["number"] == count - 1 for one in [*collector.spans]):
            time.sleep(0.01)
        assert len(collector.spans) == count


def test_tracing_ends_though_a_collector_hangs(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setattr(provider, "FLUSH_TIMEOUT_S", 0.2)
    with tracing("coordinator", None) as tracer:
        assert tracer
        tracer.start_span("one").end()
        assert collector.called.wait(60)
    assert collector.spans == []


def test_a_restarted_service_goes_on_behind_the_line_that_its_end_cut_short(tmp_path: Path) -> None:
    """The next span was written onto the stump, and the whole file could not be read."""
    path = tmp_path / "target.jsonl"
    whole = to_line(SpanRecord("before", "a" * 32, "b" * 16, None, "server", "target", "1", 0, 10)) + "\n"
    assert whole.encode().startswith(BEGINNING)
    for left in (whole + whole[:40], whole[:40], whole[:3], whole):
        path.write_text(left)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(FileExporter(path)))
        provider.get_tracer("t").start_span("after").end()
        provider.shutdown()
        before = ["before"] if "\n" in left else []
        assert [one.name for one in read_spans([str(path)])] == [*before, "after"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from opentelemetry.sdk.trace import TracerProvider
from paceline.observe.records import read_spans
from paceline.observe.spans.file_exporter import FileExporter

def spans(name, count):
    made = [TracerProvider().get_tracer("t").start_span(name) for _ in range(count)]
    for one in made:
        one.end()
    return made

path = Path(sys.argv[1])
exporter = FileExporter(path)
exporter.export(spans("before", 20))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1000, most))
print(exporter.export(spans("lost", int(sys.argv[2]))).name)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
exporter.export(spans("after", 3))
exporter.shutdown()
print(sorted({one.name for one in read_spans([str(path)])} - {"lost"}))
"""


@pytest.mark.parametrize("count", [5, 100])
def test_a_disk_that_was_full_for_a_while_costs_its_spans_and_not_the_file(count: int, tmp_path: Path) -> None:
    """The spans after it were written behind half a line, and the whole file could not be read."""
    status, out, err = python_code(FULL_DISK, str(tmp_path / "target.jsonl"), str(count))
    assert (status, out.splitlines()[-2:]) == (0, ["FAILURE", "['after', 'before']"]), err


def test_a_file_of_others_loses_nothing_to_spans(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"my": "settings"}')
    FileExporter(path).shutdown()
    assert path.read_text() == '{"my": "settings"}'
