"""The processes that a benchmark started, and their processor time."""

import psutil


def coordinator_process() -> psutil.Process:
    """Return the coordinator that this process started last."""
    return max(
        (one for one in psutil.Process().children() if "coordinator" in one.cmdline()),
        key=lambda process: process.create_time(),
    )


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads of a process so far, in user and system mode."""
    times = process.cpu_times()
    return float(times.user + times.system)


def tree_cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children so far."""
    return sum(map(cpu_s, (process, *process.children(recursive=True))))
