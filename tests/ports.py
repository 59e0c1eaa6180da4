"""Ports to listen on later, or again."""

import os
import socket
from itertools import count

_candidates = count(20_000 + os.getpid() % 1000 * 10)
"""Below the ports that the system assigns (from 32768 on), so that nobody else gets one meanwhile."""


def port_for_later() -> int:
    """Return a free port, a different one each time."""
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("every port is taken")
