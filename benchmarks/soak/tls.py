"""Certificates for one run: a CA, and one certificate that all services and the client show."""

from dataclasses import dataclass
from pathlib import Path

import trustme

from paceline.process.cluster_plan import HOST
from paceline.security.channels import ChannelSecurity, channel_security


@dataclass(frozen=True)
class RunCertificates:
    ca: Path
    certificate: Path
    key: Path

    @property
    def service_flags(self) -> tuple[str, ...]:
        """Flags for mutual TLS of a service."""
        return (
            *("--tls-certificate", str(self.certificate), "--tls-key", str(self.key)),
            *("--tls-client-ca", str(self.ca)),
        )

    @property
    def coordinator_flags(self) -> tuple[str, ...]:
        """Flags that the coordinator needs beside those of every service."""
        return "--models-ca", str(self.ca)

    @property
    def client_security(self) -> ChannelSecurity:
        """Security of a client of the coordinator."""
        return channel_security(ca=self.ca, certificate=self.certificate, key=self.key)


def make_certificates(folder: Path) -> RunCertificates:
    ca = trustme.CA()
    issued = ca.issue_cert(HOST, "localhost")
    made = RunCertificates(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    ca.cert_pem.write_to_path(str(made.ca))
    issued.private_key_pem.write_to_path(str(made.key))
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(str(made.certificate), append=number > 0)
    return made
