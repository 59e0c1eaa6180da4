"""The end of a service whose standard input ends."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.wire import termination


@pytest.fixture
def standard_input() -> Iterator[None]:
    kept = os.dup(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@pytest.mark.usefixtures("standard_input")
@pytest.mark.parametrize("is_file", [True, False])
async def test_standard_input_that_nobody_can_write_to_has_ended(is_file: bool, tmp_path: Path) -> None:
    """A service without a terminal has /dev/null there, and ended by a traceback once it listened."""
    (tmp_path / "file").write_text("not read")
    opened = os.open(tmp_path / "file" if is_file else os.devnull, os.O_RDONLY)
    os.dup2(opened, 0)
    os.close(opened)
    async with asyncio.timeout(60):
        await termination(stop_with_stdin=True)
