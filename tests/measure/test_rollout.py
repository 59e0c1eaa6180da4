"""The rollout of pods judges correctly, over a fake model, and reads the pods that podman is to run."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.rollout import Load, Pod, read_cluster
from benchmarks.soak.requests import Asked, with_references
from paceline.client import Client
from paceline.types import GenerationRequest, TokenIds
from tests.coordinators import fake_cluster
from tests.fakes.model_services import FakeDrafter, FakeVerifier
from tests.manifests import KUBERNETES

REQUESTS = [("greedy", GenerationRequest(TokenIds((5, number)), 30)) for number in range(3)]


async def asked_on(client: Client, asked: list[Asked]) -> Load:
    """Ask until every request was asked twice."""
    load, enough = Load(client, asked), asyncio.Event()
    running = asyncio.create_task(load.run(2, enough))
    while load.ended_count < 2 * len(asked):
        await asyncio.sleep(0)
    enough.set()
    await running
    return load


async def test_right_outputs_are_no_problem_and_all_are_waited_for() -> None:
    async with fake_cluster(FakeDrafter(skill=0.5), FakeVerifier(), CollectorRegistry()) as client:
        asked = await with_references(client, REQUESTS)
        load = await asked_on(client, asked)
    assert not load.problems and not load.in_flight_count
    assert load.ended_count >= 2 * len(asked)
    assert load.token_count >= 2 * sum(len(*one.outputs) for one in asked)


async def test_one_other_token_is_a_problem() -> None:
    async with fake_cluster(FakeDrafter(skill=0.5), FakeVerifier(), CollectorRegistry()) as client:
        (right,) = await with_references(client, REQUESTS[:1])
        load = await asked_on(client, [replace(right, outputs=((*right.outputs[0][:-1], 49),))])
    assert set(load.problems) == {"greedy: the output differs from the model's plain decoding"}


async def test_a_request_that_fails_is_a_problem() -> None:
    async with fake_cluster(FakeDrafter(skill=0.5), FakeVerifier(), CollectorRegistry()) as client:
        (right,) = await with_references(client, REQUESTS[:1])
        of_another = replace(right, request=replace(right.request, prompt=TokenIds(())))
        load = await asked_on(client, [of_another])
    assert load.ended_count == len(load.problems) > 0


@pytest.mark.parametrize("offset", [0, 100])
def test_the_pods_of_an_overlay_are_asked_at_their_own_ports(offset: int) -> None:
    cluster = read_cluster(KUBERNETES / "rendered/cpu.yaml", offset)
    assert Pod("paceline-draft-0", "draft", 7701 + offset, 7721 + offset) in cluster.pods
    assert cluster.address == f"127.0.0.1:{7700 + offset},127.0.0.1:{7750 + offset}"
    assert cluster.target_model == "builtin:target"
    assert {pod.container for pod in cluster.pods} >= {"paceline-coordinator-1-coordinator", "paceline-target-0-target"}
