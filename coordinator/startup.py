"""The wait for the first target."""

import asyncio

import structlog

from coordinator.replicas.replica import Replica
from coordinator.replicas.replicas import RemoteT, Replicas
from paceline.errors import PeerUnavailable, StartupError
from paceline.types import ReplicaState
from paceline.wire.peers import speaks_tls

log = structlog.get_logger()


async def wait_for_target(
    targets: Replicas[RemoteT], *, addresses: str, timeout_s: float, encrypted: bool = False
) -> None:
    """Wait until a replica is up. Raise StartupError, saying why none is up in time or why one is refused.

    `encrypted` says that the replicas are called over TLS.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await targets.looked()
            if not targets.up:
                log.info("waiting for the target service", address=addresses, timeout_s=timeout_s)
            await targets.wait_until_up()
    except TimeoutError as error:
        reasons = "; ".join([await _reason(one, encrypted) for one in targets.all])
        raise StartupError(
            f"the target service at {addresses} did not answer within {timeout_s:g} s; start it, or correct --target "
            f"({reasons or 'its name cannot be resolved'})"
        ) from error


async def _reason(replica: Replica[RemoteT], encrypted: bool) -> str:
    return f"{replica.address}: {await _state(replica, encrypted)}"


async def _state(replica: Replica[RemoteT], encrypted: bool) -> str:
    if replica.state is ReplicaState.DRAINING:
        return "it answers that it is not serving"
    error = replica.error
    if error is None:
        return "it has not answered yet"
    if not encrypted and isinstance(error, PeerUnavailable) and await speaks_tls(replica.address):
        return "it wants TLS; give the CA of its certificate with --models-ca"
    return error.message
