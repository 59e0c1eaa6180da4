"""Commands and services run as processes, and commands run in this one."""

import asyncio
import io
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from paceline.cli.app import main

ROOT = Path(__file__).parent.parent


async def start(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=PIPE, stderr=PIPE)


async def said(process: Process, words: str) -> None:
    """Wait until the process prints a line with these words on standard error."""
    assert process.stderr is not None
    while words not in (line := (await process.stderr.readline()).decode()):
        assert line, f"it ended without {words!r}"


async def ended(process: Process) -> tuple[int, str, str]:
    """Wait for the end; return the exit status, stdout and stderr."""
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def paceline(*arguments: str) -> tuple[int, str, str]:
    return await ended(await start("paceline", *arguments))


def python_code(code: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run code in its own interpreter that finds this repository; return as `ended` does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def paceline_here(*arguments: str) -> tuple[int, str, str]:
    """Run `paceline` in this process, which saves the seconds to import torch."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.argv", ["paceline", *arguments]):
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code, out.getvalue(), err.getvalue()
    raise AssertionError("a command ends with a status")
