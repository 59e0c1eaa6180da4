"""Several coordinator processes behind one port."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE

import psutil
import pytest

from coordinator.processes import reserved
from paceline.client import Client
from paceline.errors import AddressInUse
from paceline.process.service_process import announced_endpoint
from paceline.types import GenerationRequest, TokenIds
from paceline.wire.ports import Listening, bound
from tests.clusters import model_server
from tests.commands import ended, said, start
from tests.conftest import PairOfCheckpoints
from tests.services import PATIENT, Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

REQUEST = GenerationRequest(TokenIds((5, 6)), 60, ignore_end_tokens=True)


async def indexes(address: str, wanted: set[int]) -> None:
    """Connect again and again until all of the processes have answered."""
    seen: set[int] = set()
    while seen != wanted:
        async with Client(address, PATIENT) as client:
            described = await client.describe()
            assert described.process_count == 2
            seen.add(described.process_index)


async def test_processes_share_a_port_and_one_that_is_killed_is_started_again(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    async with model_server("target", pairs["Llama"].target) as target:
        service = Service(
            "coordinator", "--processes", "2", "--target", target.address, "--draft", "none", "--metrics-port", "0"
        )
        try:
            await asyncio.to_thread(service.wait_until_listening)
            assert len(set(service.metrics_urls)) == 2, "who started it learns of the first process's alone"
            await indexes(service.address, {0, 1})
            async with Client(service.address, PATIENT) as client:
                expected = (await client.complete(REQUEST)).token_ids
            one = next(one for one in psutil.Process().children(True) if "--process-index" in one.cmdline())
            one.kill()
            for _ in range(4):
                async with Client(service.address, PATIENT) as client:
                    assert (await client.complete(REQUEST)).token_ids == expected
            await indexes(service.address, {0, 1})
            async with Client(service.address, PATIENT) as client:
                running = asyncio.create_task(client.complete(REQUEST))
                await asyncio.sleep(0)
                assert await service.terminate() == 0
                running.cancel()
        finally:
            service.close()


@pytest.mark.long
async def test_a_process_that_cannot_start_again_ends_no_other_one(pairs: dict[str, PairOfCheckpoints]) -> None:
    """After five failed starts all of them ended, and with them requests that others would have finished."""
    async with model_server("target", pairs["Llama"].target) as target:
        parent = await start(
            *("coordinator", "--processes", "2", "--target", target.address, "--draft", "none"),
            *("--port", "0", "--metrics-port", "0"),
        )
        assert parent.stdout is not None
        endpoint = announced_endpoint((await parent.stdout.readline()).decode())
        of_second = int(endpoint.metrics_urls[1].rpartition(":")[2].partition("/")[0])
        (second,) = [one for one in psutil.Process(parent.pid).children() if _index_of(one) == 1]
        second.kill()
        second.wait()
        with bound(Listening("--metrics-port", "127.0.0.1", of_second)):
            await said(parent, "the others serve without it")
            async with Client(endpoint.address, PATIENT) as client:
                assert (await client.describe()).process_index == 0
                assert len((await client.complete(REQUEST)).token_ids) == REQUEST.max_new_tokens
        await said(parent, "coordinator is back")
        await indexes(endpoint.address, {0, 1})
        parent.terminate()
        assert (await ended(parent))[0] == 0


def _index_of(process: psutil.Process) -> int:
    flags = process.cmdline()
    return int(flags[flags.index("--process-index") + 1])


NOBODY = ("--target", "127.0.0.1:9", "--draft", "none", "--port", "0")
"""Flags of a coordinator that waits two minutes for a target."""


async def test_processes_that_wait_for_a_target_end_with_the_one_that_started_them() -> None:
    """They looked at nothing before they served, and kept their ports when `paceline up` was told to stop."""
    parent = await start("coordinator", "--processes", "2", *NOBODY)
    for _ in range(2):
        await said(parent, "waiting for the target")
    parent.terminate()
    # All of them write to standard error, so it ends with the last one.
    assert (await ended(parent))[0] == 128 + signal.SIGTERM


async def test_a_coordinator_that_waits_for_a_target_ends_with_its_standard_input() -> None:
    read, write = os.pipe()
    command = (sys.executable, "-m", "coordinator", *NOBODY, "--stop-with-stdin", "true")
    process = await asyncio.create_subprocess_exec(*command, stdin=read, stderr=PIPE)
    os.close(read)
    await said(process, "waiting for the target")
    os.close(write)
    assert await process.wait() == 1


@pytest.mark.parametrize("flag", ["--port", "--health-port"])
def test_a_port_that_is_taken_is_told_with_its_own_flag(flag: str) -> None:
    """That of health checks was told as --port."""
    with (
        bound(Listening("--port", "127.0.0.1", 0)) as taken,
        pytest.raises(AddressInUse, match=f"choose another {flag},"),
        reserved(flag, *taken.getsockname()),
    ):
        pass
