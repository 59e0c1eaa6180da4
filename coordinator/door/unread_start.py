"""The call that a message of a stream begins, where what it asks for cannot be read.

Only the message's outermost fields are looked at, so that a request with too much in it, or with what is no text, ends
its own call and not its stream.
"""

from google.protobuf.descriptor import Descriptor

from coordinator.door.field_count import LENGTH, VARINT, varint

MOST_FIELDS = 8
"""Outermost fields of a message that are looked at: a client writes two."""


def begun_call_id(message: bytes, descriptor: Descriptor) -> int | None:
    """Return the name of the call that a message begins; None where it begins none or is no message.

    `descriptor` is that of `GenerateStreamRequest`.
    """
    numbers = {name: field.number for name, field in descriptor.fields_by_name.items()}
    actions = {field.number for field in descriptor.oneofs_by_name["action"].fields}
    call_id = action = place = 0
    for _ in range(MOST_FIELDS):
        if place >= len(message):
            break
        tag, place = varint(message, place)
        number, wire_type = tag >> 3, tag & 7
        if wire_type not in (VARINT, LENGTH):
            return None
        value, place = varint(message, place)
        if wire_type == LENGTH:
            place += value
        elif number == numbers["call_id"]:
            call_id = value
        if number in actions:
            action = number
    begins = place == len(message) and action == numbers["start"]
    return int.from_bytes((call_id % 2**64).to_bytes(8), signed=True) if begins else None
