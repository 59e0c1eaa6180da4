"""The folder a measurement writes to: checked before anything long starts, each file whole whenever it is read."""

import os
import shutil
from pathlib import Path

from paceline.errors import InvalidRequest

ROOM_BYTES = 16 << 20
"""More than all files of a measurement together."""


def prepare_folder(folder: Path) -> None:
    """Make the folder. Raises InvalidRequest when it cannot be written to or its disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidRequest(f"--output {folder} cannot be written: {error}", field="output") from error
    if (free := shutil.disk_usage(folder).free) < ROOM_BYTES:
        raise InvalidRequest(
            f"--output {folder} has {free >> 10} KiB of disk left, and results want up to {ROOM_BYTES >> 20} MiB; "
            "free some or choose another folder",
            field="output",
        )


def replace_file(path: Path, content: str) -> None:
    """Write the whole file or leave the one that was there. Raises InvalidRequest when the disk refuses."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error}", field="output") from error
