"""Certificates for both ends of a hop, from PEM files that may be replaced while a service runs.

A server uses the current files at each handshake. A channel keeps the certificates that it was opened with;
`wire.reopening` opens a new channel when the files change.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from paceline.security.files import WatchedFiles


@dataclass(frozen=True)
class Pem:
    """Contents of the files at one moment; None for a file that was not given."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    """The CA that must have issued the other end's certificate."""


Certificates = WatchedFiles[Pem]


def watch_certificates(name: str, certificate: Path | None, key: Path | None, ca: Path | None) -> Certificates:
    """Read and watch the files. Raise StartupError when one is not PEM or the key does not fit the certificate."""
    paths = [path for path in (certificate, key, ca) if path]

    def read() -> Pem:
        _check(certificate, key, ca)
        return Pem(*(path.read_bytes() if path else None for path in (certificate, key, ca)))

    return WatchedFiles(name, paths, read)


def _check(certificate: Path | None, key: Path | None, ca: Path | None) -> None:
    """Raise OSError or ValueError unless TLS can use the files. gRPC would notice only at the first handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate:
        # Without this, a key with a password would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    if ca:
        context.load_verify_locations(ca)


def end_times_s(pem: bytes) -> list[float]:
    """Return when each certificate of a PEM file ends, in Unix time. Empty if the file cannot be read.

    TLS takes some files that the library here refuses, so that is no error.
    """
    # Imported here: it takes a tenth of a second, and commands that call without TLS never need it.
    from cryptography import x509

    try:
        return [one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(pem)]
    except ValueError:
        return []


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that follow the files. With a CA, callers must show a certificate that it vouches for."""
    served = certificates.value()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        now = certificates.value()
        if now is served:
            return None
        served = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        changed,  # type: ignore[arg-type]  # None, for no change, is missing from the stubs
        require_client_authentication=served.ca is not None,
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None and pem.certificate is not None, "a server has a certificate of its own"
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca)


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
