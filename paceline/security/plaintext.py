"""The rule that plaintext leaves the machine only when a flag allows it."""

import ipaddress

from paceline.errors import StartupError


def check_listening(host: str, *, encrypted: bool, plaintext: bool) -> None:
    """Raise StartupError when a server would accept plaintext from other machines without permission."""
    if not (encrypted or plaintext or is_loopback(host)):
        raise StartupError(
            f"--host {host} is not loopback and there is no certificate; give --tls-certificate and --tls-key, or "
            "--plaintext true where the network itself keeps strangers out"
        )


def is_loopback(host: str) -> bool:
    """Return whether the name or address means this machine on any network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
