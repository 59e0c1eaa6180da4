"""Files that somebody may need: each is replaced by a whole one, or stays as it was.

Owns how that is done; knows nothing of what is in them.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import InvalidRequest


def place_of(path: Path) -> Path | None:
    """Where the file lies that `path` names or would make: of a link, what it leads to.

    None for what can only be written to as it is: a folder, a device, a pipe, a file that has lost its name.
    """
    place = Path(os.path.realpath(path)) if os.path.islink(path) else path
    # Not of `place` alone: Linux gives the link to an open pipe a target that is no path.
    return None if os.path.exists(path) and not os.path.isfile(place) else place


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path beside `path`; what the block writes there takes the place of `path` when it ends well.

    That is a file, or a folder where there is none yet. When the block fails, nothing of it is left. What is no regular
    file, such as a pipe, is written to as it is. Raises InvalidRequest when the disk refuses.
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
        # On the disk before it takes the other's place: a machine that loses power keeps one of the two.
        with beside.open("rb") as written:
            os.fsync(written.fileno())
    os.replace(beside, place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: str) -> None:
    """Write the whole file or leave the one that was there. Raises InvalidRequest when the disk refuses."""
    with replacing(path) as beside:
        beside.write_text(content, encoding="utf-8")


def check_distinct(source: Path, output: Path) -> None:
    """Raise InvalidRequest when both names are of one file: writing the output would lose what is read."""
    if os.path.isfile(source) and os.path.exists(output) and os.path.samefile(source, output):
        raise InvalidRequest(f"--output {output} is the same file as --input {source}; name another", field="output")


def try_writing(folder: Path) -> None:
    """Raise OSError when no file can be made in the folder; nothing is left there."""
    probe = folder / f".writable.{os.getpid()}"
    probe.touch()
    probe.unlink()
