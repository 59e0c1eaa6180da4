"""Frames of HTTP/2, for what no client of gRPC sends and no server of it does."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END_OF_STREAM, END_OF_HEADERS, ANSWER = 1, 4, 1
"""Flags, of data, headers, and settings and pings."""
NO_WINDOW = b"\0\x04\0\0\0\0"
"""Setting of one who takes no data before it says so."""


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content


def call_of(path: bytes, settings: bytes = b"") -> bytes:
    """Return what a client sends over a new connection to call a path."""
    post, http = b"\x83", b"\x86"  # entries of HTTP/2's table: POST, and http
    known = post + http + b"\x04" + _literal(path) + b"\x01" + _literal(b"x")
    headers = known + b"\x0f\x10" + _literal(b"application/grpc") + b"\x00" + _literal(b"te") + _literal(b"trailers")
    return PREFACE + frame(SETTINGS, 0, 0, settings) + frame(HEADERS, END_OF_HEADERS, 1, headers)


def _literal(text: bytes) -> bytes:
    """Return a text as headers hold it, after its length."""
    return bytes([len(text)]) + text
