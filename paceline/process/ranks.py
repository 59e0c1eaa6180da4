"""The processes that hold one model together: who started this one, and the others where nobody did.

On one machine the first rank starts the others itself. Elsewhere torchrun, or what sets its variables, starts all.
Ranks that are known to be on one machine talk on loopback. It knows nothing of models.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from paceline.errors import StartupError
from paceline.types import RankGrid, RankPlace

MEETING = "RANKS_MEETING"
"""Variable with the URL where ranks that were started here meet."""
END_TIMEOUT_S = 5.0
_PLACE = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0"}
"""Variables of torchrun, and what stands for one that is not set."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def place_here(grid: RankGrid) -> RankPlace | None:
    """Return the place that this process was given by whoever started it; None if it was given none, or is alone.

    Raise StartupError when the place is not one of the grid.
    """
    if grid.rank_count == 1 or "RANK" not in os.environ:
        return None
    rank, count, device = (_number(name, otherwise) for name, otherwise in _PLACE.items())
    if count != grid.rank_count or not 0 <= rank < count:
        raise StartupError(
            f"--tensor-parallel {grid.share_count} and --pipeline-parallel {grid.stage_count} take {grid.rank_count} "
            f"processes, and this is number {rank} of {count} (RANK, WORLD_SIZE); start as many as they take"
        )
    return RankPlace(rank, grid, device, os.environ.get(MEETING, "env://"))


def _says_all_are_here(grid: RankGrid) -> bool:
    """Return whether whoever started this rank tells that all of them are on this machine."""
    return MEETING in os.environ or _number("LOCAL_WORLD_SIZE", "0") == grid.rank_count


def _number(name: str, otherwise: str) -> int:
    value = os.environ.get(name, otherwise)
    try:
        return int(value)
    except ValueError as error:
        raise StartupError(f"{name} is {value!r}; give a whole number, as torchrun does") from error


class Ranks:
    """This process's place, and the other ranks that it started."""

    def __init__(self, place: RankPlace, *, are_here: bool) -> None:
        self.place = place
        self.are_here = are_here
        """Whether all ranks are on this machine, and were started by the first one."""
        self._processes: list[asyncio.subprocess.Process] = []
        self._ended = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    @property
    def is_broken(self) -> bool:
        """Whether a rank that this process started has ended."""
        return self._ended.is_set()

    async def broken(self) -> None:
        """Wait until a rank that this process started has ended."""
        await self._ended.wait()

    def threads(self, asked: int | None) -> int | None:
        """Return the threads of this rank's operations; unless asked for, ranks of one machine divide its cores."""
        return asked or (max(1, (os.cpu_count() or 1) // self.place.grid.rank_count) if self.are_here else None)

    def remove_meeting(self) -> None:
        """Remove where the ranks of this machine met. The first one does so itself, unless it was killed."""
        if self.are_here:
            meeting = Path(urlsplit(self.place.meeting).path)
            with suppress(OSError):  # another rank was faster
                meeting.unlink(missing_ok=True)
                meeting.parent.rmdir()

    async def start_others(self, module: str) -> None:
        count = self.place.grid.rank_count
        for rank in range(1, count):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, MEETING: self.place.meeting}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *sys.argv[1:], "--stop-with-stdin", "true"),
                stdin=asyncio.subprocess.PIPE,  # closes whenever this process ends, so no rank outlives it
                stdout=sys.stderr,
                start_new_session=True,
                env=os.environ | {name: str(value) for name, value in variables.items()},
            )
            self._processes.append(process)
            self._watching.append(asyncio.create_task(self._watch(process)))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._ended.set()

    async def end_others(self, timeout_s: float) -> None:
        """Wait for the others to end, as they were told to, and kill those that do not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(one.wait() for one in self._processes))
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                await process.wait()
        for one in self._watching:
            one.cancel()


@asynccontextmanager
async def joined_ranks(module: str, grid: RankGrid) -> AsyncIterator[Ranks]:
    """Yield this process's place among the ranks of a service; as the first of one machine, start the others.

    `module` is what `python -m` starts, with this process's flags.
    """
    given = place_here(grid)
    # Before torch opens a socket: ranks have no TLS.
    if grid.rank_count > 1 and (given is None or _says_all_are_here(grid)):
        os.environ |= _LOOPBACK
    if given or grid.rank_count == 1:
        yield Ranks(given or RankPlace(), are_here=MEETING in os.environ)
        return
    with TemporaryDirectory(prefix="paceline-ranks-") as folder:
        ranks = Ranks(replace(RankPlace(grid=grid), meeting=f"file://{folder}/meeting"), are_here=True)
        timeout_s = 0.0
        try:
            await ranks.start_others(module)
            yield ranks
            timeout_s = END_TIMEOUT_S
        finally:
            await ranks.end_others(timeout_s)
