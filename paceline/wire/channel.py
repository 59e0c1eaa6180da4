"""Channels: their options, retries and security."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from paceline.security.certificates import Pem, channel_credentials
from paceline.security.channels import LOCAL, ChannelSecurity, host_of, is_ipv6
from paceline.security.limits import MAX_MESSAGE_BYTES, message_limits
from paceline.security.plaintext import is_loopback
from paceline.wire.ports import host_port
from paceline.wire.reopening import ReopeningChannel

CONNECT_MS = 5_000
"""Milliseconds that a connection may take to begin. A peer that hangs, or whose packets are lost, answers none. Who
calls it goes elsewhere then, and another connection is tried."""
_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # a minute without this (seen with grpcio 1.85.1)
    # By default the pauses between attempts grow to two minutes; a restarted peer should be found sooner.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Callers are told apart by their connections, so those of one process do not share one.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(
    address: str,
    retried_services: Sequence[str] = (),
    *,
    wrap: Callable[[grpc.aio.Channel, str], grpc.aio.Channel] | None = None,
    security: ChannelSecurity = LOCAL,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Open a channel. Raise StartupError when it would be plaintext to another machine without permission.

    Calls to `retried_services` are tried up to 4 times while the peer is UNAVAILABLE; every method of those services
    must be safe to repeat. `wrap` takes the channel and its address and returns another channel, such as one whose
    calls have spans.
    """
    security.check(address)
    options: list[tuple[str, Any]] = [
        *message_limits(max_message_bytes),
        *_OPTIONS,
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # which is the time to connect, 20 s by default
        ("grpc.service_config", _service_config(retried_services)),
    ]
    if is_loopback(host_of(address)):
        # A proxy cannot reach this machine's loopback.
        options.append(("grpc.enable_http_proxy", 0))
    if security.authority:
        options.append(("grpc.default_authority", security.authority))
    channel = _open(_target(address), security, options)
    return wrap(channel, address) if wrap else channel


def _target(address: str) -> str:
    """Return the address as gRPC reads it: without brackets, an IPv6 address and its port are a host of port 443."""
    host, _, port = address.rpartition(":")
    return host_port(host, int(port)) if is_ipv6(host) else address


def _open(address: str, security: ChannelSecurity, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    if security.certificates is None:
        return grpc.aio.insecure_channel(address, options=options)

    def open_secure(pem: Pem) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, channel_credentials(pem), options=options)

    return ReopeningChannel(security.certificates.value, open_secure)


def _service_config(retried_services: Sequence[str]) -> str:
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    methods = [{"name": [{"service": service} for service in retried_services], "retryPolicy": retry}]
    return json.dumps({"methodConfig": methods if retried_services else []})
