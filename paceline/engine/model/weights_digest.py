"""The digest of a checkpoint's weight files, independent of their names and places.

It owns the record of the files' digests, which lies in the model's folder if that can be written, and decides when to
trust it. It knows nothing of what is in the files.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from paceline.errors import InvalidRequest, ModelNotUsable
from paceline.files import replace_file

log = structlog.get_logger()

RECORD = ".paceline-digests.json"
LEAST_KEPT_BYTES = 2**27
"""Least size of weights to keep a record for; smaller ones are hashed in a tenth of a second."""
SETTLED_NS = 2 * 10**9
"""Least age of a file's last change; file times move in steps, so a younger file may change and keep its times."""
HASHING_THREADS = 4

Made = TypeVar("Made")
Stamp = tuple[int, int, int]
"""Size, time of the last change of content, and time of the last change of anything, in ns; nobody can set the last."""


def reading_with_digest(
    folder: Path, files: Sequence[Path], read: Callable[[], Made], now_ns: Callable[[], int] = time.time_ns
) -> tuple[Made, str]:
    """Return the result of `read` and the digest of the files: the SHA-256, in hexadecimal, over their own digests.

    Files that the record in `folder` does not know are hashed in other threads while `read` runs. Names and order do
    not matter. Raise what `read` raises, OSError, and ModelNotUsable when a file changed meanwhile.
    """
    stamps, began_ns = {file: _stamp(file) for file in files}, now_ns()
    known = _believed(folder, stamps)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        hashed = {file: threads.submit(_sha256, file) for file in files if file not in known}
        made = read()
        digests = known | {file: future.result() for file, future in hashed.items()}
    if changed := [file for file, stamp in stamps.items() if _stamp(file) != stamp]:
        raise ModelNotUsable(f"{changed[0]} changed while it was read; start again when it is whole")
    if hashed and _is_worth_keeping(stamps, began_ns):
        _keep(folder, stamps, digests)
    return made, hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _believed(folder: Path, stamps: Mapping[Path, Stamp]) -> dict[Path, str]:
    """Return the recorded digests of the files whose stamps are still the same."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        entries = {file: record.get(_name(folder, file)) for file in stamps}
        return {file: str(one["sha256"]) for file, one in entries.items() if one and one["stamp"] == [*stamps[file]]}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}  # no record, or not one of ours


def _is_worth_keeping(stamps: Mapping[Path, Stamp], began_ns: int) -> bool:
    total_bytes = sum(size for size, *_ in stamps.values())
    changed_ns = max(max(times_ns) for _, *times_ns in stamps.values())
    return total_bytes >= LEAST_KEPT_BYTES and changed_ns <= began_ns - SETTLED_NS


def _keep(folder: Path, stamps: Mapping[Path, Stamp], digests: Mapping[Path, str]) -> None:
    record = {_name(folder, file): {"stamp": stamp, "sha256": digests[file]} for file, stamp in stamps.items()}
    try:
        replace_file(folder / RECORD, json.dumps(record, indent=1) + "\n")
    except InvalidRequest as error:
        log.info("the digest of the weights cannot be kept and is computed at each start", reason=error.message)


def _name(folder: Path, file: Path) -> str:
    """Return the file's name in the record; an index may name a file outside the folder by its whole path."""
    return os.path.relpath(file, folder)
