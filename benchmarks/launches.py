"""What the host asks of a GPU during some work, counted by torch's profiler."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""What names of launching calls begin with."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls that wait. The profiler waits once for the whole device at its end, as our code never does."""
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Launches:
    """Numbers of calls; None where nobody counted."""

    launches: int | None
    """Kernels and recorded graphs that the host launched."""
    kernels: int | None
    """Kernels that the device ran, those of graphs included."""
    waits: int | None
    """Times that the host waited for the device."""


def counted_launches(work: Callable[[], Any]) -> Launches:
    """Run the work once, and count."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    return count((one.name, one.device_type == DeviceType.CUDA) for one in profiler.events() or ())


def count(events: Iterable[tuple[str, bool]]) -> Launches:
    """Count events, each given by its name and whether it happened on the device."""
    known = list(events)
    host = [name for name, on_device in known if not on_device]
    return Launches(
        sum(name.startswith(LAUNCHES) for name in host),
        sum(on_device and not name.startswith(COPIES) for name, on_device in known),
        sum(name.startswith(WAITS) for name in host),
    )
