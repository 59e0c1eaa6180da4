"""Order of kernels that follow each other: each is made ready while the ones before it still run.

CUDA calls it programmatic dependent launch. It saves the start of each kernel, half a microsecond on an H100, and a
layer has ten.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = 9
"""Hopper is the first that can."""


def can_overlap() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= LEAST_CAPABILITY


def launch_order(overlaps: bool) -> dict[str, bool]:
    """Return what every launch of a kernel is told."""
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}


@triton.jit
def await_earlier(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels are done, if this one may begin before; let the next one do the same.

    Every kernel calls this first, even where it does nothing afterwards: who waits for it relies on that.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
