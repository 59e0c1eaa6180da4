"""Whether a service will be able to listen: asked before it loads a model, which takes long."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

from paceline.errors import AddressInUse


class Listening(NamedTuple):
    """Where a service is to listen, and by which flag."""

    flag: str
    host: str
    port: int
    """0: any free one."""

    def refused(self) -> AddressInUse:
        return AddressInUse(
            f"cannot listen on {self.host}:{self.port}: the port is taken or the host is not this machine's; "
            f"choose another {self.flag}, or 0 for any free one"
        )


def check_ports_free(places: Iterable[Listening]) -> None:
    """Raise AddressInUse where a port is taken, or is asked for twice."""
    with ExitStack() as held:
        for one in places:
            if one.port:
                held.enter_context(_bound(one))


def _bound(place: Listening) -> socket.socket:
    """A socket that holds the port and accepts nothing."""
    try:
        found = socket.getaddrinfo(place.host.strip("[]"), place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise place.refused() from error
    bound = socket.socket(found[0][0], socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(found[0][4])
        bound.listen(1)  # two sockets that only bind may share a port
    except OSError as error:
        bound.close()
        raise place.refused() from error
    return bound
