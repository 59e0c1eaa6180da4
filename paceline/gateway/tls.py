"""TLS of the gateway's port, with files that may be replaced while it runs."""

import ssl
from pathlib import Path

from paceline.security.files import WatchedFiles


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context that takes the current files at each handshake. Raise StartupError when they are wrong."""

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without this, a key with a password would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
        return context

    files = WatchedFiles("--tls-certificate and --tls-key", [certificate, key], read)
    first = files.value()

    def use_current(connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = files.value()

    first.sni_callback = use_current
    return first
