"""The disturbance of a measurement: what other processes took of the processors, and how slow the machine was.

A peer whose threads spin while they wait for each other loses nine tenths of its speed beside one busy process, so a
figure taken then is useless. This module owns the figures and their limits; it knows nothing of what is measured.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar

import psutil

MAX_OTHERS_SHARE = 0.05
"""Most of the machine's processor time that others may take in a quiet run; an otherwise idle machine has 0.01."""
MAX_SLOWDOWN = 1.25
PROBE_BYTES = 4 << 20
PROBE_REPEATS = 9


@dataclass(frozen=True)
class Contention:
    others_share: float
    """Share of all processor time that went to processes not ours and to other machines of the same host."""
    slowdown: float
    """Time of a fixed computation beside the run, over the least time it has ever taken."""

    @property
    def is_quiet(self) -> bool:
        return self.others_share <= MAX_OTHERS_SHARE and self.slowdown <= MAX_SLOWDOWN


class Watched(Protocol):
    """A run whose contention may have been measured."""

    @property
    def contention(self) -> Contention | None: ...


class Timed(Watched, Protocol):
    """Such a run of which it is known how many tokens it made in a second."""

    @property
    def tokens_per_s(self) -> float: ...


WatchedT = TypeVar("WatchedT", bound=Watched)


@dataclass(frozen=True)
class Moment:
    """Readings of all clocks when a run begins or ends, in seconds."""

    now_s: float
    busy_s: float
    own_s: float
    probe_s: float


class Watch(Protocol):
    def begin(self) -> Moment: ...

    def since(self, began: Moment) -> Contention: ...


class MachineWatch:
    """Watches this machine. This process and those it started are ours; all other processes are others."""

    def __init__(self) -> None:
        self._cores = psutil.cpu_count() or 1
        self._fastest_s = math.inf

    def begin(self) -> Moment:
        return Moment(time.perf_counter(), _busy_s(), _own_s(), self._probe())

    def since(self, began: Moment) -> Contention:
        return contention_between(began, self.begin(), self._cores, self._fastest_s)

    def _probe(self) -> float:
        """Return the least seconds of some tries of one computation, which takes a core for some milliseconds.

        The least counts, because threads of the run that still spin may disturb one try on a machine that is not slow.
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
    """Return whether a run was watched and not disturbed."""
    return run.contention is not None and run.contention.is_quiet


def counting(runs: Sequence[WatchedT]) -> list[WatchedT]:
    """Return the runs that figures are made of: the quiet ones, or all if none was quiet."""
    return [run for run in runs if was_quiet(run)] or list(runs)


def counting_pairs(runs: Sequence[WatchedT], others: Sequence[WatchedT]) -> list[tuple[WatchedT, WatchedT]]:
    """Return the neighbouring runs of two systems that ratios are made of: both quiet, or all pairs if none is."""
    pairs = list(zip(runs, others, strict=True))
    return [pair for pair in pairs if all(map(was_quiet, pair))] or pairs


def median_ratio(runs: Sequence[Timed], others: Sequence[Timed]) -> float:
    """Return how fast one system is of another: the median of neighbouring runs' ratios, of quiet pairs if any."""
    return median(one.tokens_per_s / other.tokens_per_s for one, other in counting_pairs(runs, others))


def _busy_s() -> float:
    """Return the used processor time, with that of other machines of the host if the kernel knows of them."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    """Return the processor time of this process and of those it started, ended ones included."""
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
