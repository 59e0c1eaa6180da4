"""Commands and services as processes of their own, and commands in this one."""

import asyncio
import io
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from paceline.cli.app import main


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE)


async def ended(process: Process) -> tuple[int, str, str]:
    """Wait; return the exit status and what was printed on stdout and stderr."""
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def paceline(*arguments: str) -> tuple[int, str, str]:
    return await ended(await start("paceline", *arguments))


def paceline_here(*arguments: str) -> tuple[int, str, str]:
    """As `paceline`, in this process: without the seconds that it takes to import torch."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.argv", ["paceline", *arguments]):
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code, out.getvalue(), err.getvalue()
    raise AssertionError("a command ends with a status")
