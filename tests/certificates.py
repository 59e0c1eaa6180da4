"""Authorities and certificates for tests, in files as in a deployment."""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme

from paceline.security.certificates import watch_certificates
from paceline.wire import ServerOptions


@dataclass(frozen=True)
class CertificateFiles:
    certificate: Path
    key: Path


def watched(own: CertificateFiles, ca: Path | None = None) -> ServerOptions:
    """Return options of a server with these files; with `ca` it asks its callers for certificates."""
    return ServerOptions(watch_certificates("--tls-certificate", own.certificate, own.key, ca))


class Authority:
    """Issues certificates into a folder. Its file `ca` lists the trusted authorities: at first itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self._issued: dict[str, tuple[str, ...]] = {}
        self.ca = folder / "ca.pem"
        self.trust(self)

    def trust(self, *authorities: "Authority") -> None:
        """Trust these authorities instead."""
        _replace(self.ca, b"".join(one._authority.cert_pem.bytes() for one in authorities))

    def issue(self, *names: str, not_after: datetime | None = None) -> CertificateFiles:
        """Issue a certificate with these names; the same first name again replaces its files."""
        return self._write(self._authority, *names, not_after=not_after)

    def renew(self, by: "Authority") -> None:
        """Replace all issued certificates, in their files, by those of another authority."""
        for names in list(self._issued.values()):
            self._write(by._authority, *names)

    def _write(self, authority: trustme.CA, *names: str, not_after: datetime | None = None) -> CertificateFiles:
        self._issued[names[0]] = names
        files = CertificateFiles(self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key")
        leaf = authority.issue_cert(*names, not_after=not_after)
        _replace(files.key, leaf.private_key_pem.bytes())
        _replace(files.certificate, b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        return files


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)
