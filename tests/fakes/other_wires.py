"""A server that knows another wire than this repository's: what its messages have no field for is lost both ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from paceline.wire.handlers import WrappingInterceptor

UNUSED = 10_000
"""No field has a number above this one."""
RELEASED = Path(__file__).parents[2] / "protos" / "released.txtpb"


def released_wire() -> FileDescriptorSet:
    """Return the wire of the last release."""
    # buf adds fields of its own.
    return text_format.Parse(RELEASED.read_text(), FileDescriptorSet(), allow_unknown_field=True)


def without(wire: FileDescriptorSet, *names: str) -> FileDescriptorSet:
    """Return the wire without the fields of these names."""
    less = FileDescriptorSet.FromString(wire.SerializeToString())
    known = {field.name for message in _messages(wire) for field in message.field}
    assert known.issuperset(names), f"the wire has no {set(names) - known}"
    for field in (field for message in _messages(less) for field in message.field if field.name in names):
        field.number += UNUSED  # removed, an optional one would leave its oneof without a field
    return less


def _messages(wire: FileDescriptorSet) -> list[DescriptorProto]:
    return [message for file in wire.file if file.package == "paceline.v1" for message in file.message_type]


class OtherWire(WrappingInterceptor):
    """Every request and response of the server passes through the messages of another wire."""

    def __init__(self, wire: FileDescriptorSet) -> None:
        self._pool = DescriptorPool()
        for file in wire.file:
            self._pool.AddSerializedFile(file.SerializeToString())
        self.lost_count = 0
        """Messages that lost something."""

    def wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        service, _, name = details.method.removeprefix("/").rpartition("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        read, write = handler.request_deserializer, handler.response_serializer
        take, give = self._kept(method.input_type), self._kept(method.output_type)
        return handler._replace(
            request_deserializer=lambda encoded: read(take(encoded)) if read else take(encoded),
            response_serializer=lambda response: give(write(response)),
        )

    def _kept(self, message_type: Any) -> Callable[[bytes], bytes]:
        kind = GetMessageClass(message_type)

        def kept(encoded: bytes) -> bytes:
            message = kind.FromString(encoded)
            before = message.ByteSize()
            message.DiscardUnknownFields()
            self.lost_count += message.ByteSize() < before
            return message.SerializeToString()

        return kept
