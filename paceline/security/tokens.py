"""Clients' bearer tokens, read from secret files."""

import hashlib
import hmac
from pathlib import Path

from paceline.security.files import WatchedFiles


class KnownTokens:
    """The tokens that a service accepts, one per line of its file. Only their hashes are kept."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raise StartupError when it cannot be read or has no token.

        A file that is later emptied, deleted or made unreadable lets nobody in, for that may be meant as revocation.
        """
        self._hashes: WatchedFiles[list[bytes]] = WatchedFiles(
            "--token-file", [path], lambda: [_hash(token) for token in _tokens(path)], otherwise=[]
        )

    def admit(self, authorization: str) -> bool:
        """Return whether this is `Bearer TOKEN` with one of them."""
        scheme, _, token = authorization.partition(" ")
        # Hashes have one length and all of them are compared, so the time taken tells nothing about a token.
        given = _hash(token.strip().encode())
        is_known = sum(hmac.compare_digest(given, known) for known in self._hashes.value()) > 0
        return scheme.lower() == "bearer" and is_known


Token = WatchedFiles[str]


def watch_token(path: Path) -> Token:
    """Watch the token that a client shows, the first of its file. Raise StartupError when there is none."""
    return WatchedFiles("the token file", [path], lambda: _tokens(path)[0].decode())


def _tokens(path: Path) -> list[bytes]:
    """Return a file's tokens, one at least. Raise OSError or ValueError."""
    tokens = path.read_bytes().split()
    if not tokens:
        raise ValueError("it holds no token; write one a line")
    # Metadata cannot carry other characters.
    if not all(token.isascii() and token.decode().isprintable() for token in tokens):
        raise ValueError("a token may hold printable ASCII characters only")
    return tokens


def _hash(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()
