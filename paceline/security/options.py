"""What a service and a channel are told about security, made from settings. Plaintext never leaves the machine unasked."""

import ipaddress
from dataclasses import dataclass

import grpc

from paceline.errors import StartupError
from paceline.security.access import Check
from paceline.security.files import WatchedFile
from paceline.security.tls import ChannelTls, Identity, server_credentials


@dataclass(frozen=True)
class ServerSecurity:
    identity: Identity | None = None
    """None: plaintext."""
    client_ca: WatchedFile | None = None
    checks: tuple[Check, ...] = ()
    plaintext: bool = False
    """Plaintext is wanted on other addresses than loopback too."""

    def credentials(self, host: str) -> grpc.ServerCredentials | None:
        """None for plaintext. Raises StartupError where plaintext would leave the machine unasked."""
        if self.identity:
            return server_credentials(self.identity, self.client_ca)
        if not self.plaintext and not is_loopback(host):
            raise StartupError(
                f"--host {host} is not loopback and there is no certificate; give --tls-certificate and --tls-key, or "
                "--plaintext true where the network itself keeps strangers out"
            )
        return None


@dataclass(frozen=True)
class ChannelSecurity:
    tls: ChannelTls | None = None
    """None: plaintext."""
    token: WatchedFile | None = None
    plaintext: bool = False

    def check(self, address: str) -> None:
        """Raise StartupError where plaintext would leave the machine unasked."""
        if self.tls is None and not self.plaintext and not is_loopback(address.rpartition(":")[0]):
            raise StartupError(
                f"{address} is not on this machine and no CA is given; give the CA of its certificate, or allow "
                "plaintext where the network itself keeps strangers out"
            )


def is_loopback(host: str) -> bool:
    """Whether the name or address means this machine whatever the network says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
