"""A tracer whose spans stay in memory, as the records that `paceline trace` reads."""

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.observe.records import SpanRecord
from paceline.observe.spans.file_exporter import to_record
from paceline.observe.spans.provider import make_provider, make_tracer
from tests.waits import until


class Spans:
    def __init__(self) -> None:
        """Take the sampler from the environment, as services do."""
        self._exporter = InMemorySpanExporter()
        self.provider = make_provider("test")
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = make_tracer(self.provider)

    def __call__(self, name: str = "", kind: str = "") -> list[SpanRecord]:
        """Return all ended spans, of one name and kind where given."""
        records = map(to_record, self._exporter.get_finished_spans())
        return [one for one in records if name in ("", one.name) and kind in ("", one.kind)]

    async def one(self, name: str, kind: str) -> SpanRecord:
        """Wait for the one span of that name and kind: a server's may end after its client has the answer."""
        await until(lambda: bool(self(name, kind)))
        (span,) = self(name, kind)
        return span
