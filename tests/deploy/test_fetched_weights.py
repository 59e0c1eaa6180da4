"""Weights are fetched before a service starts, by a container that finds models as the service does."""

import asyncio
import signal
import socket
from asyncio.subprocess import Process

import pytest

from tests.commands import ended, start
from tests.manifests import GPU_OVERLAYS, workload

FETCH = workload("production", "target").pod["initContainers"][0]["command"]
OFFLINE = {"air-gapped", "air-gapped-green"}


@pytest.mark.review
@pytest.mark.parametrize("component", ["draft", "target"])
@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_weights_are_fetched_by_one_container_with_a_token_that_need_not_be_there(overlay: str, component: str) -> None:
    """Review D7: no secret for a token, and no offline mode."""
    one = workload(overlay, component)
    secrets = [volume["secret"] for volume in one.pod["volumes"] if volume["name"] == "hugging-face"]
    assert all(secret["optional"] for secret in secrets)
    before = one.pod.get("initContainers", [])
    fetching = [one.container] if overlay == "gpu" else before
    assert len(secrets) == len(fetching) == (overlay not in OFFLINE)
    for container in (one.container, *before):
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert (variables.get("HF_TOKEN_PATH") == "/hugging-face/token") is (container in fetching)
        assert any(mount["name"] == "hugging-face" for mount in container["volumeMounts"]) is (container in fetching)
    (models,) = [mount for mount in one.container["volumeMounts"] if mount["name"] == "models"]
    assert models.get("readOnly", False) is (overlay != "gpu")
    assert one.environment.get("HF_HUB_OFFLINE") == (None if overlay == "gpu" else "1")


@pytest.mark.parametrize("component", ["draft", "target"])
@pytest.mark.parametrize("overlay", ["node-weights", "production", "production-green"])
def test_the_container_before_a_service_finds_the_model_as_the_service_does(overlay: str, component: str) -> None:
    one = workload(overlay, component)
    (before,) = one.pod["initContainers"]
    assert before["image"] == one.container["image"]
    assert before["securityContext"] == one.container["securityContext"]
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in before["env"]
    assert before["envFrom"] == one.container["envFrom"]
    assert before["args"] == [f"$(PACELINE_{component.upper()}_MODEL)"]
    assert before["command"] == FETCH


async def fetching(model: str) -> Process:
    assert FETCH[:2] == ["python", "-m"]
    return await start(*FETCH[2:], model)


@pytest.mark.slow
async def test_what_that_container_runs_finds_a_model_and_fails_without() -> None:
    assert (await ended(await fetching("builtin:draft")))[0] == 0
    status, _, err = await ended(await fetching("no such model"))
    assert status == 1
    assert err.splitlines()[-1].startswith("fetch: model 'no such model' is not a directory")


@pytest.mark.slow
async def test_that_container_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It handled no signal, and to a container's first process the kernel sends no other: a deleted pod stayed on."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        process = await fetching("tiny/model")
        asked, _ = await asyncio.to_thread(hub.accept)
        with asked:
            process.terminate()
            assert (await ended(process))[0] == 128 + signal.SIGTERM
