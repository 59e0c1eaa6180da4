"""How much one message, and one connection, may carry."""

MAX_MESSAGE_BYTES = 16 << 20
"""Either way, per message. A group of 64 rows of 32k tokens is 6 MiB."""
MAX_CONCURRENT_STREAMS = 1024
"""Calls at once on one connection; more wait at the caller."""


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options for a server or a channel."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]
