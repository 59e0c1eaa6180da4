"""What passes of a model run on: which cores of which host, or which device.

Two services that use the same ones slow each other down, and their coordinator decides by that what runs beside what.
Digests alone leave this host. Knows nothing of services.
"""

import os
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
        return ComputeDescription(_digest(boot, str(torch.cuda.get_device_properties(device).uuid)), 1, 1)
    cores = sorted(os.sched_getaffinity(0))
    return ComputeDescription(_digest(boot, str(cores)), len(cores), rank_count * torch.get_num_threads())


def _digest(*parts: str) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()
