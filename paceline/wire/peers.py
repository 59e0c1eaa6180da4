"""Probes of an unknown peer, so that errors can name what answers at an address."""

import asyncio
import ssl
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.codec.names import DRAFT_SERVICE, GENERATION_SERVICE, TARGET_SERVICE
from paceline.wire.status import translated_errors

ASK_TIMEOUT_S = 3.0
COORDINATOR, DRAFT, TARGET = "a coordinator", "a draft service", "a target service"
_KINDS = {
    GENERATION_SERVICE: COORDINATOR,
    DRAFT_SERVICE: DRAFT,
    TARGET_SERVICE: TARGET,
}
_NOT_SERVED = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)


async def service_at(channel: grpc.aio.Channel) -> str:
    """Ask the standard health service, which is open to all, what is served; return it in words.

    Raise a PacelineError when nothing answers.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)  # the published type stubs lack the methods
    with translated_errors():
        for name, kind in _KINDS.items():
            try:
                await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=ASK_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NOT_SERVED:
                    raise
            else:
                return kind
    return "no service of Paceline"


async def speaks_tls(address: str) -> bool:
    """Return whether a TLS handshake with `host:port` gets as far as a certificate. A socket's file is not asked."""
    if address.startswith("unix:"):
        return False
    host, _, port = address.rpartition("/")[2].rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
