"""Libraries that `hatch_build.py` compiles when the package is installed. Knows nothing of what is in them."""

import ctypes
import zlib
from collections.abc import Sequence
from pathlib import Path


def open_library(library: Path, sources: Sequence[Path]) -> ctypes.CDLL:
    """Return the library that was compiled from these sources, in their order.

    Raise OSError when it cannot be loaded or was compiled from others, AttributeError when it does not tell.
    """
    opened = ctypes.CDLL(str(library))
    opened.paceline_source.restype = ctypes.c_uint32
    if opened.paceline_source() != zlib.crc32(b"".join(one.read_bytes() for one in sources)):
        raise OSError(f"{library.name} was compiled from another source")
    return opened
