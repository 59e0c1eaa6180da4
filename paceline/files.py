"""Atomic replacement of files: a new file appears whole, or the old one stays. Knows nothing of their contents."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

from paceline.errors import InvalidRequest


def place_of(path: Path) -> Path | None:
    """Return the path of the file that `path` names or would create, with links resolved.

    Return None for anything that cannot be replaced: a folder, a device, a pipe, a file that has lost its name.
    """
    place = Path(os.path.realpath(path)) if os.path.islink(path) else path
    # `place` alone is not enough: on Linux a link to an open pipe resolves to a path that does not exist.
    return None if os.path.exists(path) and not os.path.isfile(place) else place


def is_there(path: Path) -> bool:
    """Return whether the path names anything. Raise OSError where nothing can be, such as for a name that is too long.

    `Path.exists` says False then, from Python 3.14 on.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path beside `path`. A file or new folder written there replaces `path` when the block succeeds.

    When the block fails, nothing of it is left. For a pipe or anything else that is no regular file, yield `path`
    itself. Raise InvalidRequest when the disk refuses.
    """
    try:
        place = place_of(path)
        if place is None:
            yield path
            return
        beside = place.with_name(f"{place.name}.{os.getpid()}.new")
        try:
            yield beside
            _settle(beside, place)
        finally:
            _remove(beside)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error}", field="output") from error


def _settle(beside: Path, place: Path) -> None:
    if beside.is_file():
        if place.exists():
            shutil.copymode(place, beside)
        # The new file must be on disk before it replaces the old one, so that a power failure leaves one of the two.
        with beside.open("rb") as written:
            os.fsync(written.fileno())
    os.replace(beside, place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: str) -> None:
    """Write the whole file, or leave the old one. Raise InvalidRequest when the disk refuses."""
    with replacing(path) as beside:
        beside.write_text(content, encoding="utf-8")


def check_distinct(source: Path, output: Path, names: tuple[str, str] = ("--input", "--output")) -> None:
    """Raise InvalidRequest when both paths mean one file, because writing the output would destroy the source.

    The source may be about to be written itself. `names` are what an error calls source and output.
    """
    if _is_one_file(source, output):
        raise InvalidRequest(
            f"{names[1]} {output} is the same file as {names[0]} {source}; name another",
            field=names[1].removeprefix("--").replace("-", "_"),
        )


def check_all_distinct(*files: tuple[Path | None, str]) -> None:
    """Raise InvalidRequest when two of a command's files are one. Each comes with its flag; those written come last."""
    for (source, name), (output, own_name) in combinations(files, 2):
        if source and output:
            check_distinct(source, output, (name, own_name))


def _is_one_file(one: Path, other: Path) -> bool:
    if not os.path.exists(one):
        return os.path.realpath(one) == os.path.realpath(other)
    return os.path.isfile(one) and os.path.exists(other) and os.path.samefile(one, other)


def try_writing(folder: Path) -> None:
    """Raise OSError when no file can be made in the folder. Leave nothing there."""
    probe = folder / f".writable.{os.getpid()}"
    probe.touch()
    probe.unlink()
