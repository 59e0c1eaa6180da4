"""A limit on the number of parts in a request's message, checked without parsing it.

protobuf's parser makes an object of each part and keeps every other thread waiting until it is done: a few megabytes
can hold millions of empty parts. This check is Python, so other threads run meanwhile. It knows nothing of what the
parts mean, and leaves malformed messages to the parser.
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from paceline.errors import InvalidRequest

MAX_FIELDS = 1 << 16
"""Fields of a message and of the messages within it: parsed in some 4 ms."""
MAX_NUMBERS = 2 << 20
"""Numbers in packed lists: parsed in 15 to 22 ms. As many as 64 outputs of 32,768 tokens have, which a client that lost
its coordinator brings all at once."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Wire types; the others, of groups, bring no content."""
NOT_LAST = bytes(range(128, 256))
"""Bytes of a number that others follow. Numbers of a fixed size are only copied, so how many those are is no matter."""
PIECE_BYTES = 1 << 18
"""Counted at once, in a fraction of a millisecond: other threads run between."""


def check_field_count(message: bytes, descriptor: Descriptor) -> None:
    """Raise InvalidRequest when a message has more parts than any request that can be served."""
    if len(message) > 2 * MAX_FIELDS:  # no field takes less than two bytes
        _Count().add(message, 0, len(message), descriptor)


class _Count:
    def __init__(self) -> None:
        self._fields = 0
        self._numbers = 0

    def add(self, message: bytes, start: int, end: int, descriptor: Descriptor | None) -> None:
        """Count the well-formed fields between two places, with those of nested messages."""
        while start < end:
            self._add_field()
            tag, start = varint(message, start)
            field = descriptor.fields_by_number.get(tag >> 3) if descriptor else None
            wire_type = tag & 7
            if wire_type == VARINT:
                _, start = varint(message, start)
            elif wire_type == LENGTH:
                length, start = varint(message, start)
                self._add_content(message, start, min(end, start + length), field)
                start += length
            else:
                start += {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)

    def _add_content(self, message: bytes, start: int, end: int, field: FieldDescriptor | None) -> None:
        if field is None or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            return
        if field.message_type:
            self.add(message, start, end, field.message_type)
            return
        for place in range(start, end, PIECE_BYTES):
            self._numbers += len(message[place : min(end, place + PIECE_BYTES)].translate(None, NOT_LAST))
        if self._numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"the request has more than {MAX_NUMBERS} numbers of {field.name}, with others; send fewer",
                field=field.name,
            )

    def _add_field(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise InvalidRequest(f"the request has more than {MAX_FIELDS} fields; send lists of numbers packed")


def varint(message: bytes, start: int) -> tuple[int, int]:
    """Return a number and where it ends. Bytes beyond the message count as zeros."""
    value, shift = 0, 0
    for place in range(start, min(start + 10, len(message))):
        value |= (message[place] & 127) << shift
        shift += 7
        if message[place] < 128:
            return value, place + 1
    return value, start + 10
