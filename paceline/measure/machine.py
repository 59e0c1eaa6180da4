"""The machine that a measurement ran on, in words for its report."""

import os
import platform


def describe_machine() -> str:
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory_gib} GiB"
