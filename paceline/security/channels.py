"""What a caller shows of itself, and how it makes sure of whom it calls."""

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StartupError
from paceline.security.certificates import Certificates, watch_certificates
from paceline.security.plaintext import is_loopback
from paceline.security.tokens import Token, watch_token


@dataclass(frozen=True)
class ChannelSecurity:
    """How a caller makes sure of a server, and what it shows of itself."""

    certificates: Certificates | None = None
    """The CA of the server's certificate and perhaps a certificate to show; None: plaintext."""
    token: Token | None = None
    plaintext: bool = False
    """Plaintext, and a token in it, is wanted to other addresses than loopback too."""

    def check(self, address: str) -> None:
        """Raise StartupError where there is no port, or plaintext would leave the machine unasked."""
        if not address.startswith("unix:") and not address.rpartition(":")[2].isdecimal():
            raise StartupError(f"{address!r} has no port; give HOST:PORT, such as {address or 'localhost'}:7700")
        if self.certificates is None and not self.plaintext and not is_loopback(_host(address)):
            raise StartupError(
                f"{address} is not on this machine, and calls to it would be plaintext; give the CA of its certificate "
                "(--ca, and --models-ca for a coordinator), or --plaintext where the network itself keeps strangers out"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What is to be sent with each call."""
        return (("authorization", f"Bearer {self.token.value()}"),) if self.token else ()


LOCAL = ChannelSecurity()
"""Plaintext, to this machine only."""


def channel_security(
    *,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    token_file: str | Path | None = None,
    plaintext: bool = False,
) -> ChannelSecurity:
    """Make what a client needs from PEM files and a file with a token; all are read again when they change.

    TLS is spoken when there is a `ca`, whose certificates the server's must come from. Raises StartupError when a file
    is wrong, or a part is missing.
    """
    if (certificate is None) != (key is None):
        raise StartupError("a certificate and its key go together; give both or neither")
    if certificate and not ca:
        raise StartupError("a certificate is shown over TLS only; give the CA of the server's certificate too")
    paths = [Path(path) if path else None for path in (certificate, key, ca)]
    return ChannelSecurity(
        watch_certificates("the CA, certificate and key", *paths) if ca else None,
        watch_token(Path(token_file)) if token_file else None,
        plaintext,
    )


def _host(address: str) -> str:
    """Host of `host:port`, or of a gRPC target such as `dns:///host:port`."""
    return address.rpartition("/")[2].rpartition(":")[0]
