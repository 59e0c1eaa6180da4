"""TLS of the gateway's port, with files that may be replaced while it runs."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from paceline.security.certificates import Pem
from paceline.security.files import WatchedFiles


@dataclass(frozen=True)
class Served(Pem):
    """The certificate and key that are served with, and the context that has them."""

    context: ssl.SSLContext = field(repr=False, compare=False)


def watch_served(certificate: Path, key: Path) -> WatchedFiles[Served]:
    """Read and watch the files. Raise StartupError when they are wrong."""

    def read() -> Served:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without this, a key with a password would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
        return Served(certificate.read_bytes(), key.read_bytes(), None, context)

    return WatchedFiles("--tls-certificate and --tls-key", [certificate, key], read)


def server_context(served: WatchedFiles[Served]) -> ssl.SSLContext:
    """Return a context that takes the current files at each handshake."""
    first = served.value().context

    def use_current(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = served.value().context

    first.sni_callback = use_current
    return first
