"""The settings of memory: `--memory` is bytes, `--kv-memory` is bytes or a share of what is free."""

import re
from dataclasses import dataclass

from pydantic import ByteSize, TypeAdapter

_WHOLE = re.compile(r"\s*\+?\d*\.?\d+\s*\w*\s*")
"""A number and its unit with nothing after them, which pydantic would pass over: of `1,5GiB` it takes the 1."""


@dataclass(frozen=True)
class KvMemory:
    """A size in bytes or a share of the free memory, 0 to 1; exactly one is set."""

    size_bytes: int | None = None
    free_share: float | None = None


def parse_memory(setting: str) -> int:
    """Read bytes, such as `16GiB` or `1000000`. Raise ValueError, naming valid forms."""
    try:
        if not _WHOLE.fullmatch(setting):
            raise ValueError(f"{setting} is more than a number and its unit")
        return int(TypeAdapter(ByteSize).validate_python(setting))
    except ValueError as error:
        raise ValueError("give bytes such as 16GiB") from error


def parse_kv_memory(setting: str) -> KvMemory:
    """Read `512MiB`, `1000000` or `60%`. Raise ValueError, naming valid forms."""
    try:
        if not setting.endswith("%"):
            return KvMemory(size_bytes=parse_memory(setting))
        share = float(setting[:-1]) / 100
        if 0 < share <= 1:
            return KvMemory(free_share=share)
    except ValueError:
        pass
    raise ValueError("give bytes such as 512MiB, or a share of what is free such as 60%")
