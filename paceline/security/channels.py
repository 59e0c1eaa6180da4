"""The caller's side of security: how a caller verifies a server and identifies itself to it."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StartupError
from paceline.security.certificates import Certificates, watch_certificates
from paceline.security.plaintext import is_loopback
from paceline.security.tokens import Token, watch_token


@dataclass(frozen=True)
class ChannelSecurity:
    """How a caller verifies a server and identifies itself to it."""

    certificates: Certificates | None = None
    """The CA of the server's certificate and, optionally, the caller's own certificate; None for plaintext."""
    token: Token | None = None
    plaintext: bool = False
    """True allows plaintext, with the token in it, to addresses other than loopback."""
    authority: str | None = None
    """The server's name, also in its certificate, when that differs from its address."""

    def check(self, address: str) -> None:
        """Raise StartupError for no HOST:PORT, and when plaintext would leave the machine without permission."""
        if address.startswith("unix:"):
            return  # a file of this machine
        _check_host_and_port(address)
        if self.certificates is None and not self.plaintext and not is_loopback(host_of(address)):
            raise StartupError(
                f"{address} is not on this machine, and calls to it would be plaintext; give the CA of its certificate "
                "(--ca, --models-ca for a coordinator and --coordinator-ca for a gateway), or --plaintext (--plaintext "
                "true for both of these) where the network itself keeps strangers out"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata to send with each call."""
        return (("authorization", f"Bearer {self.token.value()}"),) if self.token else ()


LONGEST_LABEL = 63
"""Characters of a part of a name, as DNS has it."""
LARGEST_PORT = 65_535
LOCAL = ChannelSecurity()
"""Plaintext to this machine only."""


def channel_security(
    *,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    token_file: str | Path | None = None,
    plaintext: bool = False,
    authority: str | None = None,
) -> ChannelSecurity:
    """Make a client's security from PEM files and a token file. All of them are read again when they change.

    TLS is used when `ca` is given; it must have issued the server's certificate. That bears the name in the address, or
    else `authority`. Raise StartupError when a file is wrong or a part is missing.
    """
    if (certificate is None) != (key is None):
        raise StartupError("a certificate and its key go together; give both or neither")
    if certificate and not ca:
        raise StartupError("a certificate is shown over TLS only; give the CA of the server's certificate too")
    if authority and not (authority.isascii() and authority.isprintable() and authority.strip()):
        raise StartupError(f"authority is {authority!r}; give the name in the server's certificate, such as gpu-1.lan")
    paths = [Path(path) if path else None for path in (certificate, key, ca)]
    return ChannelSecurity(
        watch_certificates("the CA, certificate and key", *paths) if ca else None,
        watch_token(Path(token_file)) if token_file else None,
        plaintext,
        authority or None,
    )


def _check_host_and_port(address: str) -> None:
    """Raise StartupError for a host that libraries cannot look up: they fail by errors that are none of the network."""
    host, port = host_of(address), address.rpartition(":")[2]
    if not port.isdecimal() or (is_ipv6(address) and not is_ipv6(host)):
        raise StartupError(f"{address!r} has no port; give HOST:PORT, such as {address or 'localhost'}:7700")
    if not is_port(port):
        raise StartupError(f"{address!r} has a port beyond {LARGEST_PORT}; correct it")
    try:
        encoded = host.encode("idna")  # as it is looked up
    except UnicodeError:
        encoded = b""
    if not encoded:
        raise StartupError(
            f"{address!r} names no host: parts between points have 1 to {LONGEST_LABEL} characters, of those that DNS "
            "has for them; correct it"
        )


def is_port(text: str) -> bool:
    """Return whether a text is the number of a port; 0 stands for any free one."""
    digits = text.lstrip("0") or text  # Python reads no number of thousands of digits
    return text.isdecimal() and len(digits) <= len(str(LARGEST_PORT)) and int(digits) <= LARGEST_PORT


def is_ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address, without brackets."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Return the host of `host:port`, or of a gRPC target such as `dns:///host:port`."""
    return address.rpartition("/")[2].rpartition(":")[0]
