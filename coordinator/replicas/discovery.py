"""Addresses of the replicas of a model service: one or several HOST:PORT, each of which may resolve to many.

Owns names and addresses; knows nothing of what answers there.
"""

import asyncio
import socket
from typing import NamedTuple

from paceline.security.channels import is_port
from paceline.wire.ports import host_port


class HostPort(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_addresses(text: str) -> list[HostPort]:
    """Read `HOST:PORT[,HOST:PORT...]`. Raise ValueError, naming the part that is wrong."""
    return [_parse(part.strip()) for part in text.split(",")]


def _parse(part: str) -> HostPort:
    host, _, port = part.rpartition(":")
    if not host or not is_port(port) or not int(port):
        raise ValueError(f"{part!r} is no HOST:PORT; give one, or several separated by commas")
    return HostPort(host, int(port))


async def resolve(address: HostPort) -> set[str]:
    """Return every `IP:PORT` behind an address. Raise OSError when its name cannot be resolved.

    When a name has addresses of both families, only those of IPv4 are returned: both lead to the same servers, and each
    server would count twice.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(
        address.host.strip("[]"), address.port, type=socket.SOCK_STREAM
    )
    ips_by_family = {family: {str(place[0]) for one, *_, place in infos if one == family} for family, *_ in infos}
    ips = ips_by_family.get(socket.AF_INET) or ips_by_family[socket.AF_INET6]
    return {host_port(ip, address.port) for ip in ips}
