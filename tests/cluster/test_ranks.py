"""A target over two processes: Hugging Face's outputs, and the end of either process costs no token."""

import asyncio
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import product
from pathlib import Path

import psutil
import pytest

from paceline.client import Client, describe_target
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.process.service_process import announced_endpoint
from paceline.types import DraftSource, GenerationRequest, ReplicaState, TokenIds
from tests.checkpoints import EXPERTS, FAMILIES, VOCABULARY_SIZE, write_model, write_related_draft
from tests.cluster.test_recovery import REQUESTS, completions, coordinating, undisturbed, until_replica
from tests.commands import ended, start
from tests.conftest import PairOfCheckpoints
from tests.ports import port_for_later
from tests.services import Models, Service, model_flags, running_services, until_freed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SHARES, STAGES = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
RANK_TIMEOUT_S = 3


@contextmanager
def over_ranks(pair: PairOfCheckpoints, *grid: str) -> Iterator[Service]:
    flags = [*model_flags("target_service", pair.target), *grid, "--rank-timeout-s", str(RANK_TIMEOUT_S)]
    with running_services(flags) as (service,):
        yield service


def follower_of(service: Service) -> psutil.Process:
    """Return the process that the first rank started."""
    (follower,) = psutil.Process(service.pid).children()
    return follower


@pytest.mark.parametrize(
    ("grid", "victim"),
    [
        (SHARES, "follower"),
        pytest.param(SHARES, "first", marks=pytest.mark.long),
        pytest.param(STAGES, "follower", marks=pytest.mark.long),
        pytest.param(STAGES, "first", marks=pytest.mark.long),
        pytest.param(SHARES, "follower hangs", marks=pytest.mark.long),
        pytest.param(STAGES, "follower hangs", marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_a_rank_that_ends_or_hangs_ends_the_group_and_costs_no_token(
    grid: tuple[str, str], victim: str, models: Models, pairs: dict[str, PairOfCheckpoints]
) -> None:
    expected = await undisturbed(models)
    alone, draft = models.targets[0], models.drafts[0]
    with over_ranks(pairs["Llama"], *grid) as service:
        follower = follower_of(service)

        def disturb() -> None:
            if victim == "follower":
                follower.kill()
            elif victim == "first":
                service.kill()
            else:
                follower.suspend()

        async with coordinating(f"{alone.address},{service.address}", draft.address) as client:
            tasks = [asyncio.create_task(client.complete(one)) for one in REQUESTS]
            while not (await service.cache()).used_bytes:
                await asyncio.sleep(0.01)
            assert not all(task.done() for task in tasks)
            disturb()
            assert [one.token_ids for one in await asyncio.gather(*tasks)] == expected
            await until_replica(client, service.address, ReplicaState.DOWN)
            if victim != "first":
                assert await service.ended() == 1
            await asyncio.to_thread(follower.wait, 30)
            # What a supervisor does.
            await service.start_again()
            await until_replica(client, service.address, ReplicaState.UP)
        await until_freed(alone, draft)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_first_rank_that_ends_while_it_loads_leaves_neither_a_process_nor_a_folder(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left the folder where the ranks meet in the system's folder for what is temporary."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first = await start("target_service", "--model", "builtin:draft", *SHARES)
    while not (others := psutil.Process(first.pid).children()):
        await asyncio.sleep(0.01)
    assert meetings(tmp_path)
    first.send_signal(number)
    await ended(first)
    assert not (await asyncio.to_thread(psutil.wait_procs, others, 60))[1]
    assert not meetings(tmp_path)


async def test_a_rank_after_the_first_ends_when_it_is_told_to_while_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waited for the others, half an hour at most: a pod that was deleted meanwhile stayed for its whole grace."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = str(first.getsockname()[1])
        for name, text in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, text)
        process = await start("target_service", "--model", "builtin:draft", *SHARES)
        met, _ = await asyncio.to_thread(first.accept)
        with met:
            process.terminate()
            assert (await ended(process))[0] == 128 + signal.SIGTERM


@asynccontextmanager
async def under_torchrun(*arguments: str) -> AsyncIterator[str]:
    """Have torchrun start two ranks of a service on this machine; yield its address. No rank outlives the block."""
    meeting = ("--nproc-per-node", "2", "--master-port", str(port_for_later()))
    process = await start("torch.distributed.run", *meeting, "-m", *arguments)
    assert process.stdout
    while "listening on" not in (line := (await process.stdout.readline()).decode()):
        assert line, (await ended(process))[2]
    ranks = psutil.Process(process.pid).children(recursive=True)
    try:
        assert len(ranks) == 2
        yield announced_endpoint(line).address
    finally:
        process.terminate()
        await ended(process)
        assert not psutil.wait_procs(ranks, 10)[1]


@pytest.mark.long
@pytest.mark.parametrize("grid", [SHARES, STAGES], ids=str)
async def test_ranks_that_torchrun_starts_answer_as_one_process(
    grid: tuple[str, str], models: Models, pairs: dict[str, PairOfCheckpoints]
) -> None:
    expected = await undisturbed(models)
    draft = models.drafts[0]
    async with under_torchrun(*model_flags("target_service", pairs["Llama"].target), *grid) as address:
        assert [one.token_ids for one in await completions(address, draft.address)] == expected
        assert ("2 shares" in (await describe_target(address)).kernels) is (grid == SHARES)
    await until_freed(draft)


@pytest.mark.long
@pytest.mark.parametrize("grid", [SHARES, STAGES], ids=str)
async def test_a_draft_over_ranks_drafts_for_a_target_and_changes_no_output(
    grid: tuple[str, str], models: Models, pairs: dict[str, PairOfCheckpoints]
) -> None:
    expected = await undisturbed(models)
    target = models.targets[0]
    with running_services([*model_flags("draft_service", pairs["Llama"].draft), *grid]) as (draft,):
        assert len(psutil.Process(draft.pid).children()) == 1
        found = await completions(target.address, draft.address)
        await until_freed(target, draft)
    assert [one.token_ids for one in found] == expected
    sources = [source for one in found for source in one.finish.usage.sources]
    assert sum(one.accepted_count for one in sources if one.source == DraftSource.DRAFT) > 0


def meetings(folder: Path) -> list[Path]:
    return list(folder.glob("paceline-ranks-*"))


async def asked(client: Client, prompts: list[tuple[int, ...]]) -> AsyncIterator[list[int]]:
    for completion in await asyncio.gather(
        *(client.complete(GenerationRequest(TokenIds(one), max_new_tokens=40)) for one in prompts)
    ):
        yield completion.token_ids


@pytest.fixture
def pair(family: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> PairOfCheckpoints:
    """Return the checkpoints of a family, which are written where it is no plain decoder."""
    if family in pairs:
        return pairs[family]
    target = write_model(tmp_path / "target", family, **EXPERTS)
    return PairOfCheckpoints(target, write_related_draft(tmp_path / "draft", target, family, noise=0.05))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "grid"),
    [*product(FAMILIES, (SHARES, STAGES, (*SHARES, *STAGES))), ("Qwen3Moe", SHARES)],
    ids=str,
)
async def test_sixty_outputs_over_ranks_equal_hugging_face(grid: tuple[str, ...], pair: PairOfCheckpoints) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(rng.choice((1, 9, 40, 150)))) for _ in range(60)]
    reference = HuggingFaceReference(str(pair.target), "float32")
    expected = [reference.generate(prompt, 40) for prompt in prompts]
    with over_ranks(pair, *grid) as service, running_services(model_flags("draft_service", pair.draft)) as (draft,):
        async with coordinating(service.address, draft.address) as client:
            assert [one async for one in asked(client, prompts)] == expected
            usage = (await client.complete(REQUESTS[0])).finish.usage
        assert usage.accepted_count > 0
        assert ("2 shares" in (await describe_target(service.address)).kernels) is (SHARES[0] in grid)
        await until_freed(service, draft)
        follower = psutil.Process(service.pid).children()
        assert await service.terminate() == 0
        assert not psutil.wait_procs(follower, 10)[1]
