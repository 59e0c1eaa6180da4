"""Checks that a service can listen, made before it spends a long time loading a model."""

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

from paceline.errors import AddressInUse, StartupError


def host_port(host: str, port: int) -> str:
    """Return `host:port`. An IPv6 address gets its brackets, without which neither gRPC nor a URL takes it."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class Listening(NamedTuple):
    """A place to listen, and the flag that set it."""

    flag: str
    host: str
    port: int
    """0 for any free port."""

    def refused(self, error: OSError | UnicodeError) -> StartupError:
        """Return the error to raise for the system's: AddressInUse when the port is taken, else StartupError."""
        what = f"cannot listen on {host_port(self.host, self.port)}"
        if isinstance(error, UnicodeError):
            return StartupError(f"{what}: {self.host!r} is no name that DNS could have; choose a host of this machine")
        if error.errno == errno.EADDRINUSE:
            return AddressInUse(f"{what}: the port is taken; choose another {self.flag}, or 0 for any free one")
        return StartupError(
            f"{what}: {error.strerror or error}; choose a host of this machine and a {self.flag} that you may use"
        )

    def refused_by_grpc(self, error: RuntimeError) -> StartupError:
        """Return the same as `refused`. gRPC hides the system's reason, so the system is asked again."""
        try:
            bound(self).close()
        except StartupError as known:
            return known
        return StartupError(f"cannot listen on {host_port(self.host, self.port)} ({self.flag}): {error}")


def check_ports_free(places: Iterable[Listening]) -> None:
    """Raise AddressInUse when a port is taken or asked for twice, StartupError when listening fails otherwise."""
    with ExitStack() as held:
        for one in places:
            if one.port:
                held.enter_context(bound(one))
            else:
                bound(one).close()  # a port is free, but the host may be none of this machine's


def bound(place: Listening, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that holds the port and accepts nothing yet. Raise the errors of `refused`.

    With `is_shared`, which takes a system with SO_REUSEPORT, sockets that ask for the same may listen on the port.
    """
    try:
        found = socket.getaddrinfo(place.host.strip("[]"), place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with ExitStack() as opened:
            held = opened.enter_context(socket.socket(found[0][0], socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if is_shared else socket.SO_REUSEADDR, 1)
            held.bind(found[0][4])
            if not is_shared:
                held.listen(1)  # two sockets that only bind may share a port
            opened.pop_all()
            return held
    except (OSError, UnicodeError) as error:
        raise place.refused(error) from error
