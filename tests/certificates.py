"""Authorities and certificates for tests, in files as a deployment has them."""

import os
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class CertificateFiles:
    certificate: Path
    key: Path


class Authority:
    """A CA of its own, with its certificate in `ca`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, *names: str) -> CertificateFiles:
        """Issue a certificate of these names; the same first name again replaces its files."""
        files = CertificateFiles(self._folder / f"{names[0]}.pem", self._folder / f"{names[0]}.key")
        leaf = self._authority.issue_cert(*names)
        for path, pems in (
            (files.key, [leaf.private_key_pem]),
            (files.certificate, leaf.cert_chain_pems),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(b"".join(pem.bytes() for pem in pems))
            os.replace(new, path)
        return files
