"""Commands and services as processes of their own."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE)


async def ended(process: Process) -> tuple[int, str, str]:
    """Wait; return the exit status and what was printed on stdout and stderr."""
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def paceline(*arguments: str) -> tuple[int, str, str]:
    return await ended(await start("paceline", *arguments))
