"""What passes of a model run on: which cores of which host, or which device, and whose memory they take.

Two services that use the same ones slow each other down, and their coordinator decides by that what runs beside what.
Ranks that use the same ones share what is free there. Digests alone leave this host. Knows nothing of services.
"""

import os
import platform
from hashlib import sha256
from pathlib import Path

import torch

from paceline.types import ComputeDescription

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random bits that Linux draws when it starts: the same in all containers of a host."""


def compute_of(device: torch.device, rank_count: int = 1, boot_id: Path = BOOT_ID) -> ComputeDescription:
    """Describe what this thread's passes on a device run on; empty where the system does not tell.

    On a CPU the other ranks count as if they had as many threads on this host.
    """
    try:
        boot = boot_id.read_text()
    except OSError:
        return ComputeDescription()
    if device.type == "cuda":
        return ComputeDescription(_digest(boot, _gpu(device)), 1, 1)
    cores = sorted(os.sched_getaffinity(0))
    return ComputeDescription(_digest(boot, str(cores)), len(cores), rank_count * torch.get_num_threads())


def memory_of(device: torch.device, boot_id: Path = BOOT_ID) -> str:
    """Return a digest of the memory that a device's tensors take, which is the host's or a GPU's own.

    Where the system does not tell its start, the host's name stands for it.
    """
    try:
        host = boot_id.read_text()
    except OSError:
        host = platform.node()
    return _digest(host, _gpu(device)) if device.type == "cuda" else _digest(host)


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _digest(*parts: str) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()
