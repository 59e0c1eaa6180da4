"""Systems run in turn: their order, disturbed runs, and the threads of peers. No models."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from subprocess import PIPE
from threading import Event

import pytest

from paceline.measure.alternate import MAX_REPEATS, alternate, timed_passes
from paceline.measure.contention import Contention, MachineWatch, Moment, contention_between, was_quiet
from paceline.measure.peers import local
from paceline.measure.peers.local import THREADS_TRIED, TRIALS, LocalSystem
from paceline.measure.system import Measured
from paceline.model_service.worker import ModelWorker
from tests.fakes.watches import FakeWatch


class FakeSystem:
    """Answers with its name's length in tokens; can fail at a given pass."""

    def __init__(self, name: str, log: list[str], cancelled_at: int | None = None) -> None:
        self._name = name
        self._log = log
        self._cancelled_at = cancelled_at
        self._passes = 0

    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        if self._passes == self._cancelled_at:
            raise asyncio.CancelledError
        self._passes += 1
        self._log.append(self._name)
        return Measured([[len(self._name)]] * len(prompts), 1.0)


async def test_systems_take_turns_and_the_first_run_of_each_has_number_zero() -> None:
    log: list[str] = []
    records: list[tuple[str, int]] = []
    systems = {name: FakeSystem(name, log) for name in ("a", "b", "c")}
    await alternate(systems, [(1,)], 2, lambda key, number, measured: records.append((key, number)), FakeWatch())
    assert log == ["a", "b", "c"] * 3
    assert records == [(key, number) for number in (0, 1, 2) for key in ("a", "b", "c")]


async def test_an_interruption_keeps_the_passes_that_ended() -> None:
    log: list[str] = []
    records: list[tuple[str, int]] = []
    systems = {"a": FakeSystem("a", log), "b": FakeSystem("b", log, cancelled_at=1)}
    with pytest.raises(asyncio.CancelledError):
        await alternate(systems, [(1,)], 2, lambda key, number, measured: records.append((key, number)), FakeWatch())
    assert records == [("a", 0), ("b", 0), ("a", 1)]


@pytest.mark.review
async def test_a_run_that_others_spoiled_is_repeated_at_once_and_recorded_once() -> None:
    """Review G3: ratios taken while something else ran were too good."""
    log: list[str] = []
    kept: list[tuple[str, bool]] = []
    systems = {name: FakeSystem(name, log) for name in ("a", "b")}
    warm_ups_and_the_first_of_a = (0.5, 0.5, 0.3)
    await alternate(
        systems,
        [(1,)],
        1,
        lambda key, number, measured: kept.append((key, was_quiet(measured))),
        FakeWatch(*warm_ups_and_the_first_of_a),
    )
    assert log == ["a", "b", "a", "a", "b"]
    assert kept == [("a", False), ("b", False), ("a", True), ("b", True)]


@pytest.mark.review
async def test_on_a_machine_that_stays_busy_a_run_is_kept_in_the_end_and_says_so() -> None:
    """Review G3."""
    log: list[str] = []
    kept: list[bool] = []
    always = FakeWatch(*[0.5] * 9)
    await alternate({"a": FakeSystem("a", log)}, [(1,)], 1, lambda *told: kept.append(was_quiet(told[2])), always)
    assert len(log) == 1 + 1 + MAX_REPEATS
    assert kept == [False, False]


async def test_where_nothing_is_to_be_repeated_a_spoiled_run_is_kept_at_once_and_says_so() -> None:
    log: list[str] = []
    kept: list[bool] = []
    spoiled = FakeWatch(0.0, 0.5)
    await alternate(
        {"a": FakeSystem("a", log)}, [(1,)], 2, lambda *told: kept.append(was_quiet(told[2])), spoiled, repeats=0
    )
    assert len(log) == 1 + 2
    assert kept == [True, False, True]


def test_processor_time_of_others_and_a_slower_probe_are_contention() -> None:
    began = Moment(now_s=0, busy_s=100, own_s=50, probe_s=0.01)
    assert contention_between(began, Moment(10, 120, 70, 0.01), 2, 0.01) == Contention(0.0, 1.0)
    shared = contention_between(began, Moment(10, 120, 60, 0.01), 2, 0.01)
    assert (shared.others_share, shared.is_quiet) == (0.5, False)
    slowed = contention_between(began, Moment(10, 120, 70, 0.02), 2, 0.01)
    assert (slowed.slowdown, slowed.is_quiet) == (2.0, False)


WORKS_AND_WAITS = """
import sys, time
while time.process_time() < 0.3: pass
print(time.process_time(), flush=True)
sys.stdin.read()
"""
TICK_S = 0.01
"""Tick in which the system counts a process's time."""


@pytest.mark.review
@pytest.mark.parametrize("is_alive", [True, False])
def test_the_machine_s_watch_counts_what_our_children_do_as_ours(is_alive: bool) -> None:
    watch = MachineWatch()
    own_s, began = time.process_time(), watch.begin()
    with subprocess.Popen([sys.executable, "-c", WORKS_AND_WAITS], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin and child.stdout
        child_s = float(child.stdout.readline())
        if not is_alive:
            child.stdin.close()
            child.wait()
        own_s, ended = time.process_time() - own_s, watch.begin()
    assert ended.own_s - began.own_s - own_s >= child_s - 5 * TICK_S
    assert watch.since(began).slowdown >= 1


async def test_the_timed_passes_are_those_after_the_warm_up() -> None:
    log: list[str] = []
    passes = await timed_passes({name: FakeSystem(name, log) for name in ("a", "b")}, [(1,)], 2, FakeWatch())
    assert log == ["a", "b"] * 3
    assert {name: len(ones) for name, ones in passes.items()} == {"a": 2, "b": 2}


async def test_threads_are_not_chosen_by_a_trial_that_others_spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other load decided the trial: with all cores, a peer that spins while waiting lost most."""
    monkeypatch.setattr(local, "THREADS_TRIED", [1, 2])

    class Spinning:
        threads = 0

        def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]:
            raise AssertionError("its passes are made up")

    class Trial(LocalSystem):
        async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
            return Measured([], took_s.pop(0))

    of_one, of_two_spoiled, of_two = 2.0, 9.0, 1.0
    took_s = [of_one, of_two_spoiled, of_two] * TRIALS
    worker, peer = ModelWorker(None), Spinning()
    assert await Trial(worker, peer).take_fastest_threads([(1,)], FakeWatch(*(0.0, 0.5, 0.0) * TRIALS)) == 2
    worker.close()
    assert peer.threads == 2


async def test_a_peer_gets_the_threads_it_is_fastest_with() -> None:
    class Timed:
        threads = 7

        def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]:
            used.append(self.threads)
            return [[1]]

    used: list[int] = []
    worker = ModelWorker(None)
    peer = Timed()
    chosen = await LocalSystem(worker, peer).take_fastest_threads([(1,)], FakeWatch())
    worker.close()
    assert sorted(used) == sorted(THREADS_TRIED * TRIALS)
    assert peer.threads == chosen
    assert chosen in THREADS_TRIED
