"""Plaintext leaves the machine only where that was asked for."""

import ipaddress

from paceline.errors import StartupError


def check_listening(host: str, *, encrypted: bool, plaintext: bool) -> None:
    """Raise StartupError where a server would be open to other machines in plaintext and that was not asked for."""
    if not (encrypted or plaintext or is_loopback(host)):
        raise StartupError(
            f"--host {host} is not loopback and there is no certificate; give --tls-certificate and --tls-key, or "
            "--plaintext true where the network itself keeps strangers out"
        )


def is_loopback(host: str) -> bool:
    """Whether the name or address means this machine whatever the network says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
