"""A device that computes nothing any more: its calls go to another replica, and its service ends to be restarted."""

import asyncio
import threading
from pathlib import Path

import pytest

from coordinator.replicas.clients import RemoteVerifier
from paceline.engine.cache.paged import KvPool
from paceline.errors import InvalidRequest, PeerFailed, PeerUnavailable
from paceline.model_service.serving import device_trial, stopped_or_lost
from paceline.model_service.worker import ModelWorker
from paceline.types import VerifyRow
from tests.clusters import model_server
from tests.commands import python_code
from tests.conftest import PairOfCheckpoints

ROW = VerifyRow("a", 0, (20, 21, 22), (23,))


@pytest.fixture
def target_model(pairs: dict[str, PairOfCheckpoints]) -> Path:
    return pairs["Llama"].target


@pytest.mark.parametrize("is_lost", [True, False])
async def test_only_a_failure_of_the_device_itself_sends_a_call_elsewhere(target_model: Path, is_lost: bool) -> None:
    async with model_server("target", target_model) as server:
        verifier = RemoteVerifier(server.channel, 60.0)
        await verifier.verify([ROW])
        # This memory cannot be read: a pass fails there, and so does any trial.
        pool = server.runner.cache
        assert isinstance(pool, KvPool)
        pool.slots.memory = pool.slots.memory.to("meta")
        server.worker.watch_device(device_trial("meta" if is_lost else "cpu"))
        with pytest.raises(PeerUnavailable if is_lost else PeerFailed):
            await verifier.verify([ROW])
        assert server.worker.device_lost.is_set() is is_lost


async def test_a_refused_call_is_no_reason_to_try_the_device() -> None:
    def refuse() -> None:
        raise InvalidRequest("no")

    worker = ModelWorker(1)
    worker.watch_device(device_trial("meta"))
    with pytest.raises(InvalidRequest):
        await worker.run(refuse)
    assert not worker.device_lost.is_set()
    worker.close()


async def test_a_service_whose_device_is_lost_ends_with_an_error_and_one_that_is_told_to_stop_without() -> None:
    worker, told = ModelWorker(1), asyncio.Event()

    async def stopped() -> None:
        await told.wait()

    waiting = asyncio.create_task(stopped_or_lost(stopped(), worker))
    await asyncio.sleep(0)
    worker.lose_device()
    with pytest.raises(PeerUnavailable, match="start the service anew"):
        await waiting
    told.set()
    await stopped_or_lost(stopped(), worker)
    worker.close()


async def test_what_goes_wrong_while_a_service_waits_to_be_told_is_not_taken_for_its_being_told() -> None:
    async def stopped() -> None:
        raise PermissionError

    worker = ModelWorker(1)
    with pytest.raises(PermissionError):
        await stopped_or_lost(stopped(), worker)
    worker.close()


async def test_a_loss_is_noticed_though_the_caller_has_gone() -> None:
    began, over = threading.Event(), threading.Event()

    def fail() -> None:
        began.set()
        over.wait()
        raise RuntimeError

    worker = ModelWorker(1)
    worker.watch_device(device_trial("meta"))
    calling = asyncio.create_task(worker.run(fail))
    await asyncio.to_thread(began.wait)
    calling.cancel()
    over.set()
    await worker.device_lost.wait()
    worker.close()


async def test_what_waits_or_runs_ends_at_once_when_the_device_is_lost() -> None:
    """A rank of a model on GPUs was killed: the pass of the other never returned, and its service ended a minute later.

    Seen on an H200.
    """
    began, over = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        over.wait()

    worker = ModelWorker(1)
    calls = [asyncio.create_task(worker.run(one)) for one in (hang, lambda: None)]
    await asyncio.to_thread(began.wait)
    worker.lose_device()
    for call in calls:
        with pytest.raises(PeerUnavailable):
            await call
    with pytest.raises(PeerUnavailable):
        await worker.run(lambda: None)
    worker.close()
    over.set()


HANGING = """
import asyncio, threading, time
from paceline.model_service.serving import stopped_or_lost
from paceline.model_service.worker import ModelWorker
from paceline.process.service import run_service
from paceline.process.settings import parse_settings
from target_service.config import TargetSettings

async def serve():
    worker, began = ModelWorker(1), threading.Event()
    hanging = asyncio.create_task(worker.run(lambda: (began.set(), time.sleep(3600))))
    await asyncio.to_thread(began.wait)
    worker.lose_device()
    try:
        await stopped_or_lost(asyncio.Event().wait(), worker)
    finally:
        worker.close()

run_service("target_service", parse_settings(TargetSettings, "target_service", []), serve())
"""


@pytest.mark.timeout(120)
def test_a_process_whose_thread_never_comes_back_from_its_device_ends() -> None:
    status, _, err = python_code(HANGING)
    assert status == 1
    assert "start the service anew" in err
