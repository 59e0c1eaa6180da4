"""Filling of messages with values that a user chose, with an error that names a value the wire cannot carry."""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from paceline.errors import InvalidRequest

MessageT = TypeVar("MessageT", bound=Message)


def filled(kind: type[MessageT], values: Mapping[str, Any], *, prefix: str = "") -> MessageT:
    """Make a message. Raise InvalidRequest for a value that does not fit; `prefix` stands before its field's name."""
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            _check(kind, name, value, prefix)
        raise


def _check(kind: type[Message], name: str, value: Any, prefix: str) -> None:
    try:
        kind(**{name: value})
    except (TypeError, ValueError) as error:
        remedy = _remedy(kind, name, error)
        raise InvalidRequest(
            f"{name} is {reprlib.repr(value)}, which no call can carry; {remedy}", field=prefix + name
        ) from error


def _remedy(kind: type[Message], name: str, error: Exception) -> str:
    if isinstance(error, TypeError):
        return f"give values of its kind: {error}"
    if isinstance(error, UnicodeEncodeError):
        return "give whole characters: half a surrogate pair is none"
    field = kind.DESCRIPTOR.fields_by_name[name]
    return f"give {'0 to 2^64 - 1' if field.cpp_type == field.CPPTYPE_UINT64 else 'numbers from -2^31 to 2^31 - 1'}"
