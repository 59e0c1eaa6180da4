"""The processes that a benchmark started, with variables of its own, and their processor time."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Start processes with these variables beside this one's."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def coordinator_process() -> psutil.Process:
    """Return the coordinator that this process started last."""
    return latest_process("coordinator")


def latest_process(module: str) -> psutil.Process:
    """Return the process of a service that this process started last."""
    return max(
        (one for one in psutil.Process().children() if module in one.cmdline()),
        key=lambda process: process.create_time(),
    )


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads of a process so far, in user and system mode."""
    times = process.cpu_times()
    return float(times.user + times.system)


def tree_cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children so far."""
    return sum(map(cpu_s, (process, *process.children(recursive=True))))
