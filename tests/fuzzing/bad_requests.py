"""Requests to the gateway that are wrong in a known way, drawn as all bytes of their connection.

`tests/gateway` sends a few, `python -m benchmarks.door malformed` thousands. Knows nothing of answers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from tests.fuzzing.bad_bodies import BAD_BODIES, CHAT, COMPLETIONS, GOOD

MAX_BODY_BYTES = 1 << 16
"""Limit on bodies that the gateway has to have."""
_GOOD = json.dumps(GOOD[COMPLETIONS]).encode()
_JSON = ("content-type: application/json",)
_HOST = ("host: gateway",)
Contents = st.SearchStrategy[bytes]


@dataclass(frozen=True)
class BadRequest:
    defect: str
    """Name of what is wrong: a key of `_DEFECTS`."""
    content: bytes
    """All bytes of its connection."""


def _request(
    path: str,
    body: bytes = b"",
    method: str = "POST",
    headers: Sequence[str] = _JSON,
    length: Sequence[str] | None = None,
    host: Sequence[str] = _HOST,
) -> bytes:
    length = (f"content-length: {len(body)}",) if length is None else length
    lines = (f"{method} {path} HTTP/1.1", *host, *headers, *length)
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _good_but(**changes: Any) -> bytes:
    return _request(COMPLETIONS, _GOOD, **changes)


_MEDIA_TYPES = ["", "text/plain", "application/jsonx", "application/x-www-form-urlencoded", "text/json", "*/*", "json"]
_MEDIA_TYPES += ["multipart/form-data; boundary=x", "application/json, text/plain", "application/json+x", "\xe9"]
_media_types = st.sampled_from(_MEDIA_TYPES).map(lambda one: _good_but(headers=(f"content-type: {one}",)))

_LENGTHS = ("-1", "abc", "1 2", "0x10", "+1", "1.5", "9" * 30, "", "\xb2")
_lengths = st.sampled_from(_LENGTHS).map(lambda one: _good_but(length=(f"content-length: {one}",)))
_lengths |= st.just(_good_but(length=("content-length: 1", "content-length: 2")))

_BROKEN_HEADERS = ("bad name: x", ": x", "na(me: x", "no-colon", "x\x00y: z", "\xe9: x", "x: a\x00b", "x : y", "\t: x")
_headers = st.sampled_from(_BROKEN_HEADERS).map(lambda one: _good_but(headers=(*_JSON, one)))
_headers |= st.sampled_from(((), ("host: a", "host: b"))).map(lambda one: _good_but(host=one))
_headers |= st.sampled_from(("gzip", "chunked, gzip", "identity", "x")).map(
    lambda one: _good_but(length=(f"transfer-encoding: {one}",))
)

_CHUNKS = (
    b"zz\r\n\r\n",
    b"-5\r\n\r\n",
    b";\r\n\r\n",
    b"0x5\r\nhello\r\n",
    b"5\r\nhello!!\r\n",
    b"\r\n\r\n",
    b"g" * 30 + b"\r\n",
)
_chunks = st.tuples(st.sampled_from((COMPLETIONS, "/nowhere")), st.sampled_from(_CHUNKS)).map(
    lambda one: _request(*one, length=("transfer-encoding: chunked",))
)


def _sized(extra: int) -> bytes:
    """Return a body that is longer than what is taken."""
    return json.dumps(GOOD[COMPLETIONS] | {"prompt": "x" * (MAX_BODY_BYTES - len(_GOOD) + 3 + extra)}).encode()


def _chunked(body: bytes) -> bytes:
    piece = 1 << 12
    pieces = (body[at : at + piece] for at in range(0, len(body), piece))
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + b"0\r\n\r\n"


_sizes = st.integers(1, 1 << 16).map(lambda extra: _request(COMPLETIONS, _sized(extra)))
_sizes |= st.integers(1, 1 << 16).map(
    lambda extra: _request(COMPLETIONS, _chunked(_sized(extra)), length=("transfer-encoding: chunked",))
)
_sizes |= st.integers(MAX_BODY_BYTES + 1, 10**18).map(
    lambda length: _request(COMPLETIONS, length=(f"content-length: {length}",))
)
_header_sizes = st.sampled_from((1 << 20, 1 << 21)).map(lambda size: _good_but(headers=(*_JSON, f"x: {'a' * size}")))

_LINES = [b"GET", b"GET /health", b"GET /health HTTP/x.y", b"get health", b" / HTTP/1.1", b"GET /health HTTP/1.1 x"]
_LINES += [b"G\x00T /health HTTP/1.1", b"GET /hea lth HTTP/1.1", b"GET /health http/1.1", b"GET \xff HTTP/1.1", b"\r\n"]
_LINES += [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"G(T / HTTP/1.1", b"GET  HTTP/1.1", b"GET / HTTP/11"]
_lines = (st.sampled_from(_LINES) | st.binary(max_size=50)).map(lambda line: line + b"\r\nhost: gateway\r\n\r\n")

# HEAD is left out: its answers have no body, so no form.
_OTHERS = ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "post")
_METHODS = [(path, method) for path in (COMPLETIONS, CHAT) for method in ("GET", *_OTHERS)]
_METHODS += [(path, method) for path in ("/health", "/v1/models", "/metrics", "/") for method in ("POST", *_OTHERS)]
_methods = st.sampled_from(_METHODS).map(lambda one: _request(one[0], _GOOD, one[1]))

_PATHS = ["/v1", "/v1/chat", "/v1/completion", "/V1/COMPLETIONS", "/v1/completions%00", "/v1/completions;x", "/%ff"]
_PATHS += ["/page/none", "/page/..%2fapp.py", "/v1/models/none", "//v1/completions", "*", "/%", "/nowhere?x=/health"]
_PATHS += ["http://gateway/nowhere", "/page/%00", "/page/../../page.py", "/v1/models/" + "x" * 5000]
_paths = (st.sampled_from(_PATHS) | st.text(max_size=20).map(lambda one: f"/nowhere{quote(one, safe='')}")).flatmap(
    lambda path: st.sampled_from((_request(path, method="GET"), _request(path, _GOOD)))
)

_DEFECTS: Mapping[str, Contents] = {
    **{name: bodies.map(lambda drawn: _request(*drawn)) for name, bodies in BAD_BODIES.items()},
    "a media type that is not JSON": _media_types,
    "a broken length": _lengths,
    "a broken header": _headers,
    "broken chunks": _chunks,
    "a body that is too large": _sizes,
    "headers that are too large": _header_sizes,
    "a broken first line": _lines,
    "another method": _methods,
    "another path": _paths,
}


@st.composite
def bad_requests(draw: Callable[[Contents | st.SearchStrategy[str]], Any]) -> BadRequest:
    """Draw a request, by its defect first: each is as likely as any other."""
    defect = draw(st.sampled_from(sorted(_DEFECTS)))
    return BadRequest(defect, draw(_DEFECTS[defect]))
