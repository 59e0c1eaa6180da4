"""What is read from files that may be replaced while it is in use, as Kubernetes and cert-manager replace them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from paceline.errors import StartupError

log = structlog.get_logger()

Value = TypeVar("Value")


class WatchedFiles(Generic[Value]):
    """A value made of the content of files. Any thread may ask for it."""

    def __init__(
        self, name: str, paths: Sequence[Path], read: Callable[[], Value], *, otherwise: Value | None = None
    ) -> None:
        """`name` says in messages what the files are: the flags that gave them.

        `read` raises OSError or ValueError, without a secret in it, where the files are wrong; then StartupError is
        raised here. `otherwise` is the value while they are wrong or gone later on; None: what they held last.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._otherwise = otherwise
        self._seen = self._stamps()
        try:
            self._value = read()
        except (OSError, ValueError) as error:
            files = " and ".join(map(str, self._paths))
            raise StartupError(f"{name}: {files} cannot be used: {error}") from error

    def value(self) -> Value:
        """Return what the files hold; `otherwise`, or what they held last, while they are wrong or being replaced.

        Returns the same object until the content changes.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return self._value
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            self._seen = stamps
            if self._otherwise is None:
                log.warning(
                    "replaced files cannot be used; going on with what they held", files=self._name, error=error
                )
            else:
                self._value = self._otherwise
                log.error(
                    "replaced files cannot be used; what they held no longer holds", files=self._name, error=error
                )
            return self._value
        # Only files that stood still meanwhile are surely of one piece; otherwise the next call looks again.
        if self._stamps() == stamps:
            self._seen = stamps
            if value != self._value:
                self._value = value
                log.info("replaced files are in use", files=self._name)
        return self._value

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced or written to; None when it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
