"""Whether the machine was ours while something was measured: what others took of its processors, and how fast it was.

A peer whose threads wait for each other by spinning loses nine tenths beside one busy process, so a figure that was
taken then says nothing of either side. Owns the figures and their limits; knows nothing of what is measured.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import psutil

MAX_OTHERS_SHARE = 0.05
"""Of the machine's processor time. A machine that does nothing else has 0.01."""
MAX_SLOWDOWN = 1.25
PROBE_BYTES = 4 << 20
PROBE_REPEATS = 9


@dataclass(frozen=True)
class Contention:
    others_share: float
    """Processor time that went to processes not ours, and to other machines of the same host, over all there was."""
    slowdown: float
    """How long a fixed computation took beside the run, over the least it has taken."""

    @property
    def is_quiet(self) -> bool:
        return self.others_share <= MAX_OTHERS_SHARE and self.slowdown <= MAX_SLOWDOWN


class Watched(Protocol):
    """A run that somebody may have watched."""

    @property
    def contention(self) -> Contention | None: ...


WatchedT = TypeVar("WatchedT", bound=Watched)


@dataclass(frozen=True)
class Moment:
    """When a run begins or ends: what every clock said, in seconds."""

    now_s: float
    busy_s: float
    own_s: float
    probe_s: float


class Watch(Protocol):
    def begin(self) -> Moment: ...

    def since(self, began: Moment) -> Contention: ...


class MachineWatch:
    """Watches this machine. Ours are this process and those it started."""

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._fastest_s = math.inf

    def begin(self) -> Moment:
        return Moment(time.perf_counter(), _busy_s(), _own_s(), self._probe())

    def since(self, began: Moment) -> Contention:
        return contention_between(began, self.begin(), self._cores, self._fastest_s)

    def _probe(self) -> float:
        """Least seconds of some tries of one computation, which takes a core for some milliseconds.

        The least: what disturbs one try of them, such as threads of the run that still spin, is no slower machine.
        """
        times_s = []
        for _ in range(PROBE_REPEATS):
            began = time.perf_counter()
            hashlib.blake2b(bytes(PROBE_BYTES)).digest()
            times_s.append(time.perf_counter() - began)
        self._fastest_s = min(self._fastest_s, *times_s)
        return min(times_s)


def contention_between(began: Moment, ended: Moment, cores: int, fastest_probe_s: float) -> Contention:
    others_s = (ended.busy_s - began.busy_s) - (ended.own_s - began.own_s)
    share = others_s / (cores * (ended.now_s - began.now_s))
    return Contention(max(0.0, share), max(began.probe_s, ended.probe_s) / fastest_probe_s)


def was_quiet(run: Watched) -> bool:
    """Whether somebody watched a run and nothing else disturbed it."""
    return run.contention is not None and run.contention.is_quiet


def counting(runs: Sequence[WatchedT]) -> list[WatchedT]:
    """The runs that figures are made of: the quiet ones, or all where none was."""
    return [run for run in runs if was_quiet(run)] or list(runs)


def _busy_s() -> float:
    """Processor time that anybody has used, other machines of the host included where the kernel knows of them."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    """Processor time of this process and of those it started, the ended ones too."""
    own = psutil.Process()
    ended = own.cpu_times()
    total_s = ended.children_user + ended.children_system
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return float(total_s)
