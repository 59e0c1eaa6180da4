"""Bearer tokens of clients, from secret files."""

import hashlib
import hmac
from pathlib import Path

from paceline.errors import StartupError
from paceline.security.files import WatchedFiles


class KnownTokens:
    """The tokens that a service lets in: one a line of its file. Only their hashes are kept."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError when the file cannot be read or has no token.

        Emptied, deleted or made unreadable later, it lets nobody in: who did that may have meant to revoke its tokens.
        """
        self._hashes: WatchedFiles[list[bytes]] = WatchedFiles(
            "--token-file", [path], lambda: [_hash(token) for token in _tokens(path)], otherwise=[]
        )
        if not self._hashes.value():
            raise StartupError(f"--token-file: {path} holds no token; write one a line, or leave the flag out")

    def know(self, token: str) -> bool:
        # Hashes are of one length, and each is compared whole: the time it takes tells nothing of a token.
        given = _hash(token.encode())
        return sum(hmac.compare_digest(given, known) for known in self._hashes.value()) > 0


Token = WatchedFiles[str]


def watch_token(path: Path) -> Token:
    """The token that a client shows: the first of its file. Raises StartupError when there is none."""

    def read() -> str:
        for token in _tokens(path):
            return token.decode()
        raise ValueError("it holds no token")

    return WatchedFiles("the token file", [path], read)


def _tokens(path: Path) -> list[bytes]:
    tokens = path.read_bytes().split()
    # Others cannot be sent in metadata.
    if not all(token.isascii() and token.decode().isprintable() for token in tokens):
        raise ValueError("a token may hold printable ASCII characters only")
    return tokens


def _hash(token: bytes) -> bytes:
    return hashlib.blake2b(token).digest()
