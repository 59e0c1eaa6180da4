"""The signals that stop a service process, and the end of its standard input."""

import asyncio
import os
import signal
from collections.abc import Callable


def end_at_signals() -> None:
    """Have SIGTERM and SIGINT end this process at once, until it waits for them in another way.

    The kernel drops unhandled signals to a container's first process.
    """
    for told in (signal.SIGTERM, signal.SIGINT):
        signal.signal(told, lambda number, _: os._exit(128 + number))


def ends_with_stdin(end: Callable[[], None]) -> None:
    """Call `end` when standard input ends: the process that started this one is gone."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            end()

    try:
        loop.add_reader(0, read)
    except PermissionError:
        # A file or /dev/null: there is nothing to wait for, because nobody holds its other end.
        end()


async def termination(*, stop_with_stdin: bool = False) -> None:
    """Wait for SIGTERM or SIGINT, or for the end of standard input, which means that the starting process is gone."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)

    if stop_with_stdin:
        ends_with_stdin(stopped.set)
    try:
        await stopped.wait()
    finally:
        if stop_with_stdin:
            loop.remove_reader(0)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)
