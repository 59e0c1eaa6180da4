"""Memory: the bytes that a cache may take, and the errors that mean there is no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from paceline.errors import StartupError
from paceline.kv_memory import parse_kv_memory

CGROUP = Path("/sys/fs/cgroup")
NO_MEMORY_WORDS = (
    "can't allocate memory",  # torch on a CPU, Linux and macOS
    "not enough memory",  # torch on a CPU, Windows
    "out of memory",  # CUDA and its libraries, where torch does not translate them
    "ALLOC_FAILED",  # cuBLAS and cuDNN
    "bad_alloc",  # the C++ runtime
    "could not create a memory object",  # oneDNN
)
"""Parts of a RuntimeError's message that mean that memory ran out."""


def kv_memory_bytes(setting: str, device: torch.device) -> int:
    """Turn the `--kv-memory` setting into bytes; a share is taken of what is free on the device now."""
    budget = parse_kv_memory(setting)
    if budget.free_share is not None:
        return int(budget.free_share * free_bytes(device))
    assert budget.size_bytes is not None
    return budget.size_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed because the host or the device had no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY_WORDS)


@contextmanager
def refusing_to_start(words: str) -> Iterator[None]:
    """Raise StartupError with these words when memory runs out inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(words) from error


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device; on a CPU at most what the container's control group leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
