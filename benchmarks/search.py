"""Search for failing cases that the tests do not draw: `python -m benchmarks.search --minutes 60`.

It makes passes over hypothesis' tests and the fuzz until the time is up, each pass with a seed of its own, and prints
every find as a case to paste. Exit status 1 when there were any.
"""

import asyncio
import json
import re
import secrets
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import run_command

ROOT = Path(__file__).parent.parent
FUZZ_INPUTS = 500
"""Fuzz inputs of a pass: about a third of its time."""
REPRODUCTION = "Failing test case: "


@dataclass(frozen=True)
class Find:
    test: str
    """Test that failed, or the command that failed."""
    case: str
    """Text to paste: an `@example`, or the steps of a state machine; without either, the printed output."""


@dataclass
class Search:
    """Passes and their finds so far."""

    paths: Sequence[str] = ()
    """Paths of tests; empty for all tests."""
    fuzz_inputs: int = FUZZ_INPUTS
    processes: int = 2
    pass_count: int = 0
    example_count: int = 0
    finds: list[Find] = field(default_factory=list)

    async def run(self, seeds: Iterator[int], until_s: float) -> None:
        """Make passes side by side until `time.monotonic` reaches `until_s`; let the last ones finish."""

        async def one_after_another() -> None:
            while time.monotonic() < until_s or not self.pass_count:
                await self._pass(next(seeds))

        async with asyncio.TaskGroup() as running:
            for _ in range(self.processes):
                running.create_task(one_after_another())

    async def _pass(self, seed: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            await self._test(seed, Path(folder) / "report.xml")
            if self.fuzz_inputs:
                await self._fuzz(seed, Path(folder) / "counts.json")
        self.pass_count += 1

    async def _test(self, seed: int, report: Path) -> None:
        status, said = await printed(
            *("pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.profiles", "-p", "no:cacheprovider"),
            *("-m", "hypothesis and not slow", "--hypothesis-profile", "search", "--hypothesis-seed", str(seed)),
            *("--hypothesis-show-statistics", "--tb", "short", "--timeout", "0", "--junitxml", str(report)),
            *self.paths,
        )
        self.example_count += sum(map(int, re.findall(r"- (\d+) passing", said)))
        failed = failures(report)
        for find in failed:
            self._found(find, seed)
        if status and not failed:
            self._found(Find(f"pytest ended with status {status}", said[-3000:]), seed)

    async def _fuzz(self, seed: int, counts: Path) -> None:
        flags = ("--inputs", str(self.fuzz_inputs), "--seed", str(seed))
        status, said = await printed("benchmarks.fuzz", *flags, "--output", str(counts))
        input_count, problem = fuzzed(counts)
        self.example_count += input_count
        if status:
            self._found(Find(f"python -m benchmarks.fuzz {' '.join(flags)}", problem or said[-3000:]), seed)

    def _found(self, find: Find, seed: int) -> None:
        if find not in self.finds:
            self.finds.append(find)
            print(f"\n# {find.test}, seed {seed}\n{find.case}", flush=True)


async def printed(*arguments: str) -> tuple[int, str]:
    """Run `python -m` with `arguments` in the project's folder; return the exit status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace")


def failures(report: Path) -> list[Find]:
    """Return the failures of a pass from its JUnit file; none if there is no file."""
    if not report.exists():
        return []
    return [
        Find(f"{case.get('classname')}.{case.get('name')}", pasteable(failure.text or ""))
        for case in ElementTree.parse(report).iter("testcase")
        for failure in (*case.iter("failure"), *case.iter("error"))
    ]


def fuzzed(counts: Path) -> tuple[int, str]:
    """Return the fuzz's number of inputs and its problem from its file; 0 and no problem if there is no file."""
    if not counts.exists():
        return 0, ""
    told = json.loads(counts.read_text())
    return told["inputs"], told["problem"]


def pasteable(text: str) -> str:
    """Turn hypothesis' report of an example into the decorator that always tries it."""
    _, found, case = re.sub(r"(?m)^E {3}", "", text).partition(REPRODUCTION)
    return re.sub(r"^test\w*\(", "@example(", case) if found else text


def main(
    minutes: Annotated[float, typer.Option(min=0, help="No pass begins later. At least one is made.")] = 10,
    seed: Annotated[int | None, typer.Option(help="Of the first pass; unset: a random one.")] = None,
) -> None:
    """Search at random for what the tests do not draw, and print each find as a case to paste."""
    search, began_s = Search(), time.monotonic()
    first_seed = secrets.randbelow(2**31) if seed is None else seed
    print(f"Searching for {minutes:g} minutes from seed {first_seed} on ...", flush=True)
    try:
        asyncio.run(search.run(count(first_seed), began_s + 60 * minutes))
    finally:
        print(
            f"\n{search.pass_count} passes, {search.example_count} examples and inputs in "
            f"{(time.monotonic() - began_s) / 60:.1f} minutes: {len(search.finds)} finds",
            flush=True,
        )
    sys.exit(bool(search.finds))


if __name__ == "__main__":
    run_command(main)
