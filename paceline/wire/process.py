"""The signals that stop a service process."""

import asyncio
import os
import signal


async def termination(*, stop_with_stdin: bool = False) -> None:
    """Wait for SIGTERM or SIGINT, or for the end of standard input, which means that the starting process is gone."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)

    def read() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stopped.set()

    if stop_with_stdin:
        loop.add_reader(0, read)
    try:
        await stopped.wait()
    finally:
        if stop_with_stdin:
            loop.remove_reader(0)
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)
