"""A file whose content may be replaced while it is in use, as Kubernetes and cert-manager do."""

from pathlib import Path

import structlog

from paceline.errors import StartupError

log = structlog.get_logger()


class WatchedFile:
    def __init__(self, path: Path, flag: str) -> None:
        """Raises StartupError, naming the flag, when the file cannot be read now."""
        self._path = path
        try:
            self._stamp = self._read_stamp()
            self._content = path.read_bytes()
        except OSError as error:
            raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from error

    def content(self) -> bytes:
        """What the file holds now; what it held last when it cannot be read, which happens while it is replaced."""
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._content = self._path.read_bytes()
                self._stamp = stamp
        except OSError as error:
            log.warning("a file could not be read again; going on with what it held", path=str(self._path), error=error)
        return self._content

    def _read_stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size
