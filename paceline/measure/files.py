"""The folder a measurement writes to, checked before anything long starts."""

import shutil
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.files import try_writing

ROOM_BYTES = 16 << 20
"""More than all files of a measurement together."""


def prepare_folder(folder: Path) -> None:
    """Make the folder. Raise InvalidRequest when it cannot be written to or its disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try_writing(folder)
    except OSError as error:
        raise InvalidRequest(f"--output {folder} cannot be written: {error}", field="output") from error
    if (free := shutil.disk_usage(folder).free) < ROOM_BYTES:
        raise InvalidRequest(
            f"--output {folder} has {free >> 10} KiB of disk left, and results want up to {ROOM_BYTES >> 20} MiB; "
            "free some or choose another folder",
            field="output",
        )
