"""Certificates for one run: a CA of its own, and one certificate that all services and the client show."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import trustme

from paceline.launcher import HOST


@dataclass(frozen=True)
class RunCertificates:
    ca: Path
    certificate: Path
    key: Path

    @property
    def service_flags(self) -> tuple[str, ...]:
        """Mutual TLS for a service."""
        return (
            *("--tls-certificate", str(self.certificate), "--tls-key", str(self.key)),
            *("--tls-client-ca", str(self.ca)),
        )

    @property
    def coordinator_flags(self) -> tuple[str, ...]:
        """What the coordinator needs beside them."""
        return "--models-ca", str(self.ca)


def client_options(certificates: RunCertificates) -> dict[str, Any]:
    """What a client of the coordinator is made with."""
    channels: Any = import_module("paceline.security.channels")
    paths = {"ca": certificates.ca, "certificate": certificates.certificate, "key": certificates.key}
    return {"security": channels.channel_security(**paths)}


def make_certificates(folder: Path) -> RunCertificates:
    ca = trustme.CA()
    issued = ca.issue_cert(HOST, "localhost")
    made = RunCertificates(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    ca.cert_pem.write_to_path(str(made.ca))
    issued.private_key_pem.write_to_path(str(made.key))
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(str(made.certificate), append=number > 0)
    return made
