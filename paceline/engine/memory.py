"""Memory: the bytes that a cache may take, and the errors that mean there is no more."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from paceline.errors import StartupError
from paceline.kv_memory import parse_kv_memory, parse_memory
from paceline.planning.dimensions import ModelDimensions
from paceline.planning.memory import (
    CONTEXT_BYTES,
    KEPT_BYTES,
    STARTED_BYTES,
    CallSize,
    WeightForm,
    held_logit_count,
    rounded_mib,
    serving_work_bytes,
)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
LEAST_MAPPED_BYTES = 1 << 20
"""Size from which each block is a mapping of its own, which the system has back once it is freed."""
MOST_FREE_BYTES = 1 << 17
"""Most that is kept free at the end of a heap: glibc's own choice at first."""
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


def kv_memory_bytes(setting: str, device: torch.device, sharing_count: int = 1) -> int:
    """Turn the `--kv-memory` setting into bytes; a share is taken of what is free on the device now.

    `sharing_count` processes, this one included, divide that share among themselves.
    """
    budget = parse_kv_memory(setting)
    if budget.free_share is not None:
        return int(budget.free_share * free_bytes(device)) // sharing_count
    assert budget.size_bytes is not None
    return budget.size_bytes


@dataclass(frozen=True)
class MemoryShares:
    """What a budget for all is divided into."""

    held_bytes: int
    """What the process takes: itself, and the model's weights."""
    work_bytes: int
    """What its largest calls may take meanwhile, in all lanes."""
    kv_bytes: int
    """What is left for the cache; negative if the budget does not hold the rest."""
    logit_count: int
    """Of how many places such a call may hold logits at a time."""


def shares_of(
    setting: str, held_bytes: int, dimensions: ModelDimensions, form: WeightForm, call: CallSize, lanes: int = 1
) -> MemoryShares:
    """Divide the `--memory` setting of a process that has taken `held_bytes` and runs `lanes` calls at a time."""
    left = parse_memory(setting) - held_bytes
    count = held_logit_count(dimensions, form, call, left_bytes=left // lanes)
    work = lanes * serving_work_bytes(dimensions, form, replace(call, logit_count=count))
    return MemoryShares(held_bytes, work, left - work, count)


def check_shares(setting: str, shares: MemoryShares, least_kv_bytes: int) -> None:
    """Raise StartupError, with the numbers, when a budget leaves the cache too little."""
    if shares.kv_bytes < least_kv_bytes:
        needed = shares.held_bytes + shares.work_bytes + least_kv_bytes
        raise StartupError(
            f"--memory {setting} does not hold this model: {rounded_mib(shares.held_bytes)} MiB are taken once it is "
            f"loaded, calls take up to {rounded_mib(shares.work_bytes)} MiB, and a token of the cache is to fit; "
            f"give at least {rounded_mib(needed)}MiB, a lower --prefill-chunk-tokens, or --quantization int8"
        )


def taken_bytes(device: torch.device) -> int:
    """Return what this process takes of the device's memory while it serves, once nothing is kept without need."""
    gc.collect()
    if device.type == "cuda":
        give_back_to(device)
        return int(torch.cuda.memory_reserved(device)) + CONTEXT_BYTES
    give_back()
    return int(psutil.Process().memory_info().rss) + STARTED_BYTES + KEPT_BYTES


def give_back_to(device: torch.device) -> None:
    """Give a GPU what torch keeps of freed memory. Loading joins weights, whose parts are as much as half a model."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def give_back() -> None:
    """Give the system what the C library keeps of freed memory. Loading leaves as much as a large weight."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_free_lists_short() -> None:
    """Have the C library keep little of what is freed. Call it before there are threads.

    It would learn from the largest block that was freed to keep tens of MiB of such blocks, in pieces between others.
    """
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LEAST_MAPPED_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, MOST_FREE_BYTES)


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
    """Return the free memory of the device, once a GPU has back what was freed.

    On a CPU it is at most what the container's control group leaves.
    """
    if device.type == "cuda":
        give_back_to(device)
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
