"""Reading the body of a request within its limits, and telling what is wrong with it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from paceline.gateway import bodies
from paceline.gateway.errors import HttpError, invalid, too_many

BODY_TIMEOUT_S = 60.0
LONG_BODY_BYTES = 64 << 10
"""Bodies from this size on are read in a thread, so that no stream waits for them."""
MOST_BODIES_BYTES = 64 << 20
"""Bytes of the bodies of all requests in work; what is made of one while it is read may take 60 times as much."""
FULL_OF_BODIES = "the gateway has as many bytes of bodies in work as it takes; ask again later, or for less at a time"
BodyT = TypeVar("BodyT", bound=BaseModel)
ReadT = TypeVar("ReadT")
_FIELDS = {
    name
    for model in vars(bodies).values()
    if isinstance(model, type) and issubclass(model, bodies.Body)
    for name in model.field_names()
}


class BodyRoom:
    """The room that the bodies of all requests in work have together."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes

    @contextmanager
    def one(self) -> Iterator[Callable[[int], None]]:
        """Yield what takes room for so many more bytes, while the block runs, or raises HttpError."""
        taken_bytes = 0

        def take(byte_count: int) -> None:
            nonlocal taken_bytes
            if byte_count > self._left_bytes:
                raise too_many(FULL_OF_BODIES)
            taken_bytes += byte_count
            self._left_bytes -= byte_count

        try:
            yield take
        finally:
            self._left_bytes += taken_bytes


async def read_body(
    request: Request, read: Callable[[bytes], ReadT], max_bytes: int, take_room: Callable[[int], None]
) -> ReadT:
    """Return what `read` makes of a body. Raise HttpError, or ClientDisconnect when the client goes away first."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(
            415, "content-type is not application/json; send the body as JSON and say so", param="content-type"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HttpError(415, f"content-encoding is {coding[:80]!r}; send the body as it is", param="content-encoding")
    content = await _received(request, max_bytes, take_room)
    if len(content) < LONG_BODY_BYTES:
        return read(content)
    return await asyncio.to_thread(read, content)


async def _received(request: Request, max_bytes: int, take_room: Callable[[int], None]) -> bytes:
    """Return the body. What is left of one that is refused is read away, by the server or by `ReadsAway`."""
    too_large = HttpError(
        413, f"the body is larger than the {max_bytes} bytes that are taken", code="request_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                content += piece
                if len(content) > max_bytes:
                    raise too_large
                take_room(len(piece))
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    return bytes(content)


def parse(content: bytes, kind: type[BodyT]) -> BodyT:
    """Parse and check a body. Raise HttpError that names the field."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    param, words = _param(problem["loc"]), _words(problem)
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, bodies.WrongField):
        param = f"{param}.{cause.name}" if param else cause.name
    raise invalid(f"{param or 'the body'} {words}", param)


def _words(problem: ErrorDetails) -> str:
    """Return what is wrong with a field, to be said behind its name."""
    match problem["type"]:
        case "missing":
            return "is needed"
        case "too_long":
            return "has {actual_length} entries; give {max_length} at most".format_map(problem["ctx"])
        case "too_short":
            return "has {actual_length} entries; give {min_length} at least".format_map(problem["ctx"])
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
    value = repr(problem["input"]) if _is_short(problem["input"]) else "wrong"
    return f"is {value}: {problem['msg']}"


def _param(path: tuple[int | str, ...]) -> str | None:
    """Return the field as clients write it. Names of a union's members, which a path has too, end it."""
    words = ""
    for part in path:
        if isinstance(part, str) and part not in _FIELDS and words:
            break
        words += f"[{part}]" if isinstance(part, int) else f".{part}"
    return words.lstrip(".") or None


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64)
