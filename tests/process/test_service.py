"""A service's announcement that it is ready, and work that it skips from then on."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from paceline.process.service import announce, freeze_heap
from paceline.process.service_process import Endpoint, announced_endpoint
from tests.commands import python_code


@pytest.fixture
def heap() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("heap")
def test_what_lives_when_a_service_is_ready_is_never_searched_for_garbage() -> None:
    freeze_heap()
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < 1000


def test_a_service_says_on_one_line_where_it_listens(capsys: pytest.CaptureFixture[str]) -> None:
    announce("target_service", "127.0.0.1:7701", "http://127.0.0.1:9701/metrics")
    listening = "target_service listening on 127.0.0.1:7701, metrics on http://127.0.0.1:9701/metrics\n"
    assert capsys.readouterr().out == listening


def test_who_starts_a_service_of_several_processes_learns_where_each_tells_its_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`paceline up --coordinator-processes` printed the first one's alone."""
    urls = tuple(f"http://127.0.0.1:{port}/metrics" for port in (7710, 7711))
    announce("coordinator", "127.0.0.1:7700", *urls)
    assert announced_endpoint(capsys.readouterr().out) == Endpoint("127.0.0.1:7700", urls)


def test_a_service_whose_starter_is_gone_before_it_listens_says_so_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service of a killed `paceline up` printed a traceback of its broken pipe once it had loaded its model."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", nobody_reads := os.fdopen(write, "w"))
    announce("target_service", "127.0.0.1:7701", None)
    with suppress(BrokenPipeError):
        nobody_reads.close()


LOADING = """
import asyncio, os, signal, sys, time
from paceline.process.service import run_service
from paceline.process.settings import parse_settings
from target_service.config import TargetSettings

def load():
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(15)
    print("loaded")

async def serve():
    await asyncio.to_thread(load)

run_service("target_service", parse_settings(TargetSettings, "target_service", []), serve())
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_service_that_is_told_to_end_does_not_load_its_model_first(told: signal.Signals) -> None:
    """After Ctrl-C it went on until the model was there."""
    assert python_code(LOADING, told.name)[:2] == (128 + told, "")


@pytest.mark.usefixtures("heap")
def test_the_size_of_what_is_frozen_does_not_put_off_the_garbage_collector() -> None:
    at_start, whole = [list[int]() for _ in range(200_000)], list[str]()

    def note(phase: str, about: dict[str, int]) -> None:
        if about["generation"] == 2:
            whole.append(phase)

    known = gc.get_threshold()
    freeze_heap()
    try:
        gc.set_threshold(100, 5, 5)
        gc.callbacks.append(note)
        _later = [list[int]() for _ in range(len(at_start) // 10)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*known)
    assert whole
