"""Limits on the size of one message and the calls of one connection, and those of gRPC itself."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes per message in either direction. A group of 64 rows of 32k tokens takes 6 MiB."""
LEAST_MESSAGE_BYTES = 1 << 17
"""Lowest limit that a model service can work with: its tokenizer comes in pieces of half of that."""
MAX_CONCURRENT_STREAMS = 1024
"""Concurrent calls on one connection; further calls wait at the caller."""
MAX_CHANNEL_ARGUMENT = (1 << 31) - 1
"""gRPC's options are 32-bit numbers."""
LONGEST_TIMEOUT_S = 1e9
"""gRPC treats a longer timeout as already expired."""


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return gRPC options for a server or a channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
