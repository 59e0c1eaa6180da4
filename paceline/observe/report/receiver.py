"""A small OTLP/gRPC receiver for `paceline trace --listen` and the tests. It keeps all spans in memory."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from paceline.observe.records import EventRecord, LinkRecord, SpanRecord, check_numbers
from paceline.wire import running_server
from paceline.wire.ports import Listening, check_ports_free

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TraceService"].full_name
KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client"}


class Receiver(TraceServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.spans: list[SpanRecord] = []

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExportTraceServiceResponse:
        """Keep spans that reports can count with, and tell of the others."""
        response = pb.ExportTraceServiceResponse()
        for span in records_of(request):
            try:
                check_numbers(span.attributes)
                self.spans.append(span)
            except ValueError as error:
                response.partial_success.rejected_spans += 1
                response.partial_success.error_message = f"span {span.span_id}: {error}"
        return response


@asynccontextmanager
async def running_receiver(host: str, port: int) -> AsyncIterator[Receiver]:
    """Receive while the block runs. Raise AddressInUse or StartupError."""
    receiver = Receiver()
    check_ports_free([Listening("--listen", host, port)])  # the server knows no flag but its own
    async with running_server(
        host, port, [SERVICE_NAME], lambda server: add_receiver(receiver, server), grace_s=1
    ) as server:
        receiver.address = server.address
        server.set_serving(True)
        yield receiver


def add_receiver(receiver: Receiver, server: grpc.aio.Server) -> None:
    add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]


def records_of(request: pb.ExportTraceServiceRequest) -> Iterator[SpanRecord]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _record(span, resource)


def _record(span: Span, resource: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        kind=KINDS.get(span.kind, "internal"),
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
        links=tuple(
            LinkRecord(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links
        ),
        events=tuple(EventRecord(one.name, one.time_unix_nano, _attributes(one.attributes)) for one in span.events),
    )


def _attributes(entries: Iterable[KeyValue]) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in entries}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, kind) if kind else None
