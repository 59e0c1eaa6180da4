"""How many of our files a request passes, and a token: `python -m benchmarks.files_passed`.

All three services and `paceline generate` run in this process, and every call of a function is noted. A file counts for
the request if one of its functions runs while `paceline generate` does. It counts for the token if one runs between the
target's logits and the terminal's `print`. Generated code is left out. So is what is made once,
such as a channel of the coordinator's: a request before this one made it.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from typer.testing import CliRunner

from benchmarks.commands import run_command
from paceline.cli.app import app as paceline
from tests.clusters import cluster

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / room) + "/" for room in ("paceline", "coordinator", "draft_service", "target_service"))
GENERATED = str(ROOT / "paceline" / "v1") + "/"
LOGITS = str(ROOT / "paceline" / "engine" / "sampling.py")
TERMINAL = str(ROOT / "paceline" / "cli" / "generate.py")

app = typer.Typer(add_completion=False, help=__doc__)


@dataclass
class FilesPassed:
    """A profiler for every thread that begins while it is there."""

    request: set[str] = field(default_factory=set)
    token: set[str] = field(default_factory=set)
    _noting: bool = False
    _token_on_its_way: bool = False

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        path = frame.f_code.co_filename
        if not self._noting or not path.startswith(OURS) or path.startswith(GENERATED):
            return
        if event == "c_call" and called is print and path == TERMINAL:
            self._token_on_its_way = False
        if event != "call":
            return
        self.request.add(path)
        self._token_on_its_way |= path == LOGITS and frame.f_code.co_name == "choose"
        if self._token_on_its_way:
            self.token.add(path)

    @contextmanager
    def noting(self) -> Iterator[None]:
        self._noting = True
        try:
            yield
        finally:
            self._noting = False


def generate(address: str, *flags: str) -> None:
    result = CliRunner().invoke(paceline, ["generate", "What is 12 + 30?", "--address", address, *flags])
    if result.exit_code:
        raise SystemExit(result.output)


async def serve(ready: Future[str], stop: threading.Event) -> None:
    """Serve the built-in pair until told to stop."""
    async with cluster("builtin:target", "builtin:draft") as running:
        ready.set_result(running.coordinator_address)
        await asyncio.to_thread(stop.wait)


@contextmanager
def services() -> Iterator[str]:
    """Serve from another thread, for the command wants the main one; yield the coordinator's address."""
    ready, stop = Future[str](), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, serve(ready, stop))
        try:
            yield ready.result()
        finally:
            stop.set()
            ended.result()


def count(max_new_tokens: int, *flags: str) -> FilesPassed:
    """Send the request twice; note the files of the second."""
    files = FilesPassed()
    threading.setprofile(files)
    sys.setprofile(files)
    flags = ("--max-new-tokens", str(max_new_tokens), *flags)
    try:
        with services() as address:
            generate(address, *flags)
            with files.noting():
                generate(address, *flags)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files


@app.command()
def main() -> None:
    """Print both lists of files and their lengths."""
    request = count(16).request
    token = count(1, "--no-speculation").token
    for what, files in (("prompt to terminal", request), ("logits to terminal, one token", token)):
        print(f"{what}: {len(files)} files")
        for path in sorted(files):
            print(f"  {Path(path).relative_to(ROOT)}")


if __name__ == "__main__":
    run_command(app)
