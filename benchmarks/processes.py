"""The processes that a benchmark started, as the machine sees them."""

import psutil


def coordinator_process() -> psutil.Process:
    """The coordinator that this process started last."""
    return max(
        (one for one in psutil.Process().children() if "coordinator" in one.cmdline()),
        key=lambda process: process.create_time(),
    )


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all its threads so far, in user and system mode."""
    times = process.cpu_times()
    return float(times.user + times.system)
