"""Values read from files that may be replaced while in use, as Kubernetes and cert-manager do."""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from paceline.errors import StartupError

log = structlog.get_logger()

Value_co = TypeVar("Value_co", covariant=True)


class WatchedFiles(Generic[Value_co]):
    """A value made from the contents of files. Any thread may read it."""

    def __init__(
        self, name: str, paths: Sequence[Path], read: Callable[[], Value_co], *, otherwise: Value_co | None = None
    ) -> None:
        """Read the files. Raise StartupError when they are wrong.

        `name` names the files in messages, by their flags. `read` raises OSError or ValueError for wrong files; its
        message holds no secret. `otherwise` is the value while the files are wrong or gone later; None keeps the last.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._otherwise = otherwise
        self._seen: object = self._stamps()
        """The state of the files of which `_value` is; None: they are to be read again, changed or not."""
        self._refused: object = None
        """The state of files that cannot be used, of which the log has told; None while they can."""
        try:
            self._value = read()
        except (OSError, ValueError) as error:
            files = " and ".join(map(str, self._paths))
            raise StartupError(f"{name}: {files} cannot be used: {error}") from error

    def value(self) -> Value_co:
        """Return the files' value: the same object until the content changes.

        While they are wrong or being replaced, return `otherwise`, or the last value when that is None.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return self._value
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            # Else the system may be at fault, such as for too many open files: the next call tries again.
            self._seen = stamps if isinstance(error, (ValueError, ssl.SSLError)) else None
            self._refuse(stamps, error)
            return self._value
        # Files that changed during the read may not belong together, so the next call reads them again.
        if self._stamps() == stamps:
            self._seen, self._refused = stamps, None
            if value != self._value:
                self._value = value
                log.info("replaced files are in use", files=self._name)
        return self._value

    def _refuse(self, stamps: object, error: Exception) -> None:
        """Take what holds while the files are wrong, and tell of each state of them once."""
        if self._otherwise is not None:
            self._value = self._otherwise
        if self._refused == stamps:
            return
        self._refused = stamps
        if self._otherwise is None:
            log.warning("replaced files cannot be used; going on with what they held", files=self._name, error=error)
        else:
            log.error("replaced files cannot be used; what they held no longer holds", files=self._name, error=error)

    def _stamps(self) -> list[tuple[int, int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    """Return a value that changes when a file is replaced, written to or made readable; None when it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    # A file may be written with a time of its own, and its mode changes no time but that of the change.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
