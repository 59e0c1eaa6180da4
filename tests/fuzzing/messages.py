"""Requests from the protobuf descriptors: fields plausible, absurd or absent, and bytes broken on the wire.

Knows the names of fields, and nothing about services. Each strategy is made once: hypothesis looks a new one over, and
that takes longer than to draw from it.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Values = st.SearchStrategy[Any]
Kind = FieldDescriptor

SEQUENCE_IDS = ("a", "b", "c", "someone else's", "0123456789ab-1")
"""Few ids, so that calls meet each other's sequences; the last has a coordinator's form."""

_TOKENS = st.integers(8, 319)
PLAUSIBLE: Mapping[str, Values] = {
    "sequence_id": st.sampled_from(SEQUENCE_IDS),
    "sequence_ids": st.sampled_from(SEQUENCE_IDS),
    "base_length": st.sampled_from((0, 0, 0, 1, 3, 8)),
    "length": st.integers(0, 8),
    "token_ids": _TOKENS,
    "values": _TOKENS,
    "draft_token_ids": _TOKENS,
    "draft_count": st.integers(1, 6),
    "max_new_tokens": st.integers(1, 8),
    "max_draft_count": st.integers(0, 6),
    "completion_count": st.integers(0, 3),
    "top_logprob_count": st.integers(0, 5),
    "received_token_ids": _TOKENS,
    "completion_index": st.integers(0, 2),
    "text": st.sampled_from(("2 + 2 =", "A hen lays 3 eggs.", "é\0\u202e🐔")),
    "user_message": st.sampled_from(("2 + 2 =", "{{ 1 / 0 }}", "<|user|>")),
    "stop_strings": st.sampled_from(("\n", "Answer", "🐔")),
    "stop_token_ids": _TOKENS,
    "end_token_ids": _TOKENS,
    "token_id": _TOKENS,
    "temperature": st.floats(0.001, 2),
    "top_k": st.integers(0, 50),
    "top_p": st.floats(0.1, 1),
    "min_p": st.floats(0, 0.5),
    "bias": st.floats(-5, 5),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "min_new_tokens": st.integers(0, 4),
    "prompt_count": st.integers(0, 8),
}

SHARES: Mapping[str, int] = {
    "received_token_ids": 2,
    "received_outputs": 4,
    "logit_bias": 5,
    "stop_token_ids": 8,
    "stop_strings": 8,
    "min_new_tokens": 10,
    "max_new_tokens": 36,
    "top_k": 20,
    "min_p": 20,
}
"""How many of 40 messages have the field, if it differs from the default."""

_INTEGERS = {
    **dict.fromkeys((Kind.TYPE_INT32, Kind.TYPE_SINT32, Kind.TYPE_SFIXED32, Kind.TYPE_ENUM), (-(2**31), 2**31 - 1)),
    **dict.fromkeys((Kind.TYPE_INT64, Kind.TYPE_SINT64, Kind.TYPE_SFIXED64), (-(2**63), 2**63 - 1)),
    **dict.fromkeys((Kind.TYPE_UINT32, Kind.TYPE_FIXED32), (0, 2**32 - 1)),
    **dict.fromkeys((Kind.TYPE_UINT64, Kind.TYPE_FIXED64), (0, 2**64 - 1)),
}
_ODD_FLOATS = (float("nan"), float("inf"), float("-inf"), 5e-324, 1e-40, 1e308, -1.0, 0.0, -0.0, 100.0, 1000.0)
_LENGTHS = (0, 1, 2, 128, 129, 600, 20_000)
"""Absurd lengths of texts and lists."""
MAX_ROWS = 40
"""Most rows in a list of messages: each row is answered."""


@cache
def _absurd(field: FieldDescriptor) -> Values:
    """Return values of a field that is not a message."""
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        edges = [one for one in (low, high, -1, 0, 1, 319, 320, 4095, 4096, 2**31 - 1) if low <= one <= high]
        return st.sampled_from(edges) | st.integers(low, high)
    if field.type == Kind.TYPE_DOUBLE:
        return st.sampled_from(_ODD_FLOATS) | st.floats()
    if field.type == Kind.TYPE_FLOAT:
        return st.floats(width=32)
    if field.type == Kind.TYPE_BOOL:
        return st.booleans()
    if field.type == Kind.TYPE_BYTES:
        return st.binary(max_size=50)
    long = st.builds(lambda text, length: text * length, st.text(min_size=1, max_size=3), st.sampled_from(_LENGTHS))
    return long | st.text(max_size=30)


@cache
def _value(field: FieldDescriptor) -> Values:
    if field.message_type is not None:
        return messages(field.message_type)
    if field.name in PLAUSIBLE:
        # Seldom absurd: about one field of a message should be wrong, so that all checks are reached.
        return st.integers(0, 40).flatmap(lambda dice: PLAUSIBLE[field.name] if dice else _absurd(field))
    return _absurd(field)


@cache
def _values(field: FieldDescriptor) -> Values:
    if not field.is_repeated:
        return _value(field)
    some = st.lists(_value(field), min_size=1, max_size=5)
    if field.message_type is not None:
        many = st.builds(lambda value, count: [value] * count, _value(field), st.integers(0, MAX_ROWS))
    else:
        many = st.builds(lambda value, count: [value] * count, _value(field), st.sampled_from(_LENGTHS))
    return st.integers(0, 30).flatmap(lambda dice: some if dice else many)


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update({entry.key: entry.value for entry in value})
    elif field.is_repeated:
        getattr(message, field.name).extend(value)
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


_FORTIETHS = st.integers(0, 39)


@cache
@st.composite
def messages(draw: Callable[[Values], Any], descriptor: Descriptor) -> Message:
    """Draw a message with most fields set; of a oneof's fields the last one set wins."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw(_FORTIETHS) < SHARES.get(field.name, 16 if field.has_presence else 38):
            _set(message, field, draw(_values(field)))
    return message


def _flip(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + bytes([content[place] ^ (value or 1)]) + content[place + 1 :]


MUTATIONS: Mapping[str, Callable[[bytes, int, int], bytes]] = {
    "flip bits": _flip,
    "truncate": lambda content, place, value: content[:place],
    "repeat": lambda content, place, value: content + content[place:],
    "insert": lambda content, place, value: content[:place] + bytes([value]) * 3 + content[place:],
    "drop": lambda content, place, value: content[:place] + content[place + 1 + value % 4 :],
    # As a length it is far beyond the end; as text it is not UTF-8.
    "overwrite": lambda content, place, value: content[:place] + b"\xff\xff\xff\xff\x07" + content[place + 5 :],
}


def mutated(draw: Callable[[Values], Any], content: bytes, most: int) -> bytes:
    """Return bytes with at most so many mutations."""
    for _ in range(draw(st.integers(1, most))):
        if content:
            mutate = MUTATIONS[draw(st.sampled_from(sorted(MUTATIONS)))]
            content = mutate(content, draw(st.integers(0, len(content) - 1)), draw(st.integers(0, 255)))
    return content


@cache
@st.composite
def payloads(draw: Callable[[Values], Any], descriptor: Descriptor) -> bytes:
    """Draw bytes for a message of this type: a message, a mutated message, or any bytes."""
    kind = draw(st.sampled_from(("message",) * 8 + ("mutated",) * 3 + ("bytes",)))
    if kind == "bytes":
        return bytes(draw(st.binary(max_size=100)))
    content = bytes(draw(messages(descriptor)).SerializeToString())
    return mutated(draw, content, 3) if kind == "mutated" else content
