"""Numbers of the host on their way to a device."""

from collections.abc import Sequence

import torch


def to_device(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the numbers, of any depth, as a tensor on the device; the host does not wait for it.

    CUDA takes a copy of ordinary memory before the call returns, so the host's tensor may go at once. What is launched
    afterwards finds the numbers there.
    """
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
