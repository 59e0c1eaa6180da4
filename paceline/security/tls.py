"""TLS for both ends of a hop, from PEM files that may be replaced while a service runs.

A server takes what the files hold at each handshake. A channel keeps what it was opened with: `ChannelTls.version`
changes when it should be opened anew.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from paceline.errors import StartupError
from paceline.security.files import WatchedFile

log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """A certificate and its key."""

    certificate: WatchedFile
    key: WatchedFile

    def pem(self) -> tuple[bytes, bytes]:
        """Key and certificate chain."""
        return self.key.content(), self.certificate.content()


def read_identity(certificate: Path | None, key: Path | None) -> Identity | None:
    """Read a certificate with its key; None when neither is given. Raises StartupError."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        missing = "--tls-certificate" if certificate is None else "--tls-key"
        raise StartupError(f"{missing} is missing: a certificate and its key go together")
    return Identity(WatchedFile(certificate, "--tls-certificate"), WatchedFile(key, "--tls-key"))


def server_credentials(identity: Identity, client_ca: WatchedFile | None) -> grpc.ServerCredentials:
    """Credentials of a server; with `client_ca` callers must show a certificate that it vouches for."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([identity.pem()], client_ca.content() if client_ca else None)

    last = (identity.pem(), client_ca.content() if client_ca else None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        now = (identity.pem(), client_ca.content() if client_ca else None)
        if now == last:
            return None
        last = now
        log.info("certificates were replaced")
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed, require_client_authentication=bool(client_ca))


@dataclass(frozen=True)
class ChannelTls:
    """How a channel makes sure of the server, and what it shows of itself."""

    ca: WatchedFile
    identity: Identity | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        key, certificate = self.identity.pem() if self.identity else (None, None)
        return grpc.ssl_channel_credentials(self.ca.content(), key, certificate)

    def version(self) -> int:
        """Differs from what it was when a file was replaced."""
        return hash((self.ca.content(), self.identity.pem() if self.identity else None))
