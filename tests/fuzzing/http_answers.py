"""What the gateway answers to the bytes of a connection, and whether it is a refusal in OpenAI's form."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from io import BytesIO
from typing import Any

READ_BYTES = 1 << 16
END_OF_HEAD = b"\r\n\r\n"
FORM = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    media_type: str
    body: bytes


class _Received:
    """What `HTTPResponse` reads from in place of a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: Any) -> BytesIO:
        return BytesIO(self._content)


async def answer_to(address: str, content: bytes) -> HttpAnswer | None:
    """Send all bytes, then read the answer, as most clients do; return None where the connection ended without one."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received, answer = b"", None
    with suppress(ConnectionError):
        writer.write(content)
        await writer.drain()
    with suppress(ConnectionError):
        while answer is None and (piece := await reader.read(READ_BYTES)):
            received += piece
            answer = _read(received)
    writer.transport.abort()
    return answer


def _read(received: bytes) -> HttpAnswer | None:
    """Read an answer; None as long as it is not whole."""
    if END_OF_HEAD not in received:
        return None
    response = HTTPResponse(_Received(received))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except HTTPException:
        return None
    return HttpAnswer(response.status, response.headers.get_content_type(), body)


def complaint(answer: HttpAnswer | None) -> str:
    """Return what is wrong with the answer to a bad request; empty for nothing."""
    if answer is None:
        return "no answer"
    if not 400 <= answer.status < 500:
        return f"status {answer.status}: {answer.body!r}"
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status} without the form: {answer.body!r}"
    is_right = answer.media_type == "application/json" and error.keys() == FORM and error["message"] and error["type"]
    return "" if is_right else f"status {answer.status}, {answer.media_type}: {answer.body!r}"
