"""Ports that something is to listen on later, or again."""

import os
import socket
from itertools import count

_candidates = count(20_000 + os.getpid() % 1000 * 10)
"""Below those that the system hands out (from 32768 on), so that nobody who asks it for any is given one meanwhile."""


def port_for_later() -> int:
    """Return a port that is free, and another one each time."""
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("every port is taken")
