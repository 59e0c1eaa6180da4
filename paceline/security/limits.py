"""Limits on the size of one message and the calls of one connection."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes per message in either direction. A group of 64 rows of 32k tokens takes 6 MiB."""
MAX_CONCURRENT_STREAMS = 1024
"""Concurrent calls on one connection; further calls wait at the caller."""


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options for a server or a channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
