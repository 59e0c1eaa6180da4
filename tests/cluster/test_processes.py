"""Real processes: services and commands start, fail to start, and stop."""

import asyncio
import json
import signal
import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import httpx2
import psutil
import pytest

from paceline.client import Client
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.service_process import ServiceProcess
from paceline.types import GenerationRequest, SamplingParameters, Text, UserMessage
from tests.certificates import Authority
from tests.clusters import cluster_here, model_server
from tests.commands import ended, paceline, paceline_here, said, start
from tests.conftest import PairOfCheckpoints
from tests.ports import port_for_later
from tests.services import running_trio

pytestmark = pytest.mark.slow

QUESTIONS = [
    GenerationRequest(
        UserMessage(f"Tom has {n} apples and eats {n // 3}. How many are left?"),
        24,
        sampling=SamplingParameters(temperature=0.7),
        seed=3,
    )
    for n in range(4, 12)
]
UP_ON_FREE_PORTS = (
    *("paceline", "up", "--metrics-port", "0"),
    *("--coordinator-port", "0", "--draft-port", "0", "--target-port", "0"),
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["target_service", "--model", "/nowhere"], "is not a directory"),
        pytest.param(
            ["draft_service", "--model", "builtin:other"], "builtin:target and builtin:draft", marks=pytest.mark.long
        ),
        (
            ["draft_service", "--host", "host.invalid", "--port", "1", "--plaintext", "true"],
            "cannot listen on host.invalid:1",
        ),
        (["target_service", "--host", "0.0.0.0"], "--host 0.0.0.0 is not loopback and there is no certificate"),
        (["coordinator", "--draft", "draft.test:1", "--target", "127.0.0.1:1"], "draft.test:1 is not on this machine"),
        (
            ["draft_service", "--metrics-host", "host.invalid", "--metrics-port", "1"],
            "cannot listen on host.invalid:1",
        ),
        (
            ["coordinator", "--draft", "127.0.0.1:1", "--target", "127.0.0.1:1", "--startup-timeout-s", "0.5"],
            "the target service at 127.0.0.1:1 did not answer within 0.5 s",
        ),
    ],
)
async def test_a_service_that_cannot_start_says_why_in_one_line(arguments: Sequence[str], words: str) -> None:
    status, out, err = await ended(await start(*arguments))
    assert status == 1
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out == ""


async def test_services_that_guard_themselves_answer_a_command_that_shows_its_token(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for name in ("draft.test", "target.test", "coordinator.test"):
        authority.issue(name, "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("a-token")

    def tls(name: str, *more: str) -> list[str]:
        return ["--tls-certificate", f"{tmp_path}/{name}.pem", "--tls-key", f"{tmp_path}/{name}.key", *more]

    guard = ("--tls-client-ca", str(authority.ca), "--tls-allowed-names", "coordinator.test", "--describe", "false")
    own = tls("coordinator.test", "--models-ca", str(authority.ca), "--token-file", str(token))
    with running_trio(tls("target.test", *guard), tls("draft.test", *guard), own) as trio:
        flags = ["generate", "2 + 2 =", "--max-new-tokens", "8", "--address", trio.coordinator.address]
        status, out, err = await paceline(*flags, "--ca", str(authority.ca), "--token-file", str(token))
        assert status == 0
        assert out.strip()
        assert "draft tokens accepted" in err
        status, out, err = await paceline(*flags, "--ca", str(authority.ca))
        assert (status, out) == (1, "")
        assert "no valid token" in err


async def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = await ended(await start("draft_service", "--port", str(port)))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err


async def test_the_coordinator_waits_for_services_that_come_later() -> None:
    port = port_for_later()
    target = f"127.0.0.1:{port}"
    async with model_server("draft", "builtin:draft") as draft:
        coordinator = await start("coordinator", "--draft", draft.address, "--target", target)
        assert coordinator.stderr is not None
        assert coordinator.stdout is not None
        assert b"starting" in await coordinator.stderr.readline()
        assert b"waiting for the target service" in await coordinator.stderr.readline()
        async with model_server("target", "builtin:target", port=port):
            address = (await coordinator.stdout.readline()).decode().split()[-1]
            async with Client(address) as client:
                completion = await client.complete(GenerationRequest(Text("2 + 2 ="), max_new_tokens=5))
            assert len(completion.token_ids) <= 5
            coordinator.terminate()
            assert (await ended(coordinator))[0] == 0


async def test_sigterm_lets_a_running_stream_end_and_the_process_exits_cleanly() -> None:
    async with model_server("draft", "builtin:draft") as draft, model_server("target", "builtin:target") as target:
        # Time enough for the stream on a busy machine.
        flags = ["--draft", draft.address, "--target", target.address, "--shutdown-grace-s", "200"]
        coordinator = await start("coordinator", *flags)
        assert coordinator.stdout is not None
        address = (await coordinator.stdout.readline()).decode().split()[-1]
        async with Client(address) as client:
            request = GenerationRequest(Text("2 + 2 ="), max_new_tokens=60, ignore_end_tokens=True)
            stream = client.generate(request)
            tokens = list((await anext(stream)).tokens)
            coordinator.terminate()
            async for piece in stream:
                tokens += piece.tokens
            assert len(tokens) == 60
        assert (await ended(coordinator))[0] == 0


async def test_a_killed_service_can_be_started_again_on_its_ports() -> None:
    # The service that starts soonest.
    service = ServiceProcess("paceline.gateway", ["--coordinator", "127.0.0.1:1", "--metrics-port", "0"])

    async def answers(url: str) -> bytes:
        with await asyncio.to_thread(urllib.request.urlopen, url) as response:
            body: bytes = response.read()
            return body

    try:
        first = await service.start()
        assert first.metrics_url
        urls = (f"http://{first.address}/", first.metrics_url)
        assert all([await answers(url) for url in urls])
        await service.kill()
        for url in urls:
            with pytest.raises(URLError):
                await answers(url)
        assert await service.start() == first
        assert all([await answers(url) for url in urls])
    finally:
        await service.stop()


async def test_run_answers_every_good_line_in_order_and_names_the_bad_ones(tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": "A hen lays 3 eggs a day. How many eggs in 5 days?"}),
        "{broken",
        json.dumps({"question_id": 81, "turns": ["Tom has 4 apples and eats 1. How many are left?", "And then?"]}),
        "",
        json.dumps({"prompt": ""}),
        json.dumps(["no object"]),
        json.dumps({"id": "last", "prompt": "x" * 20_000}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    flags = ["--input", str(tmp_path / "in.jsonl"), "--max-new-tokens", "20"]
    async with cluster_here(ClusterOptions()) as addresses:
        status, _, err = await paceline(
            "run", *flags, "--output", str(tmp_path / "out.jsonl"), "--address", addresses.coordinator
        )
        await paceline(
            *("run", *flags, "--output", str(tmp_path / "plain.jsonl"), "--address", addresses.coordinator),
            "--no-speculation",
        )
    assert status == 1
    assert "line 2 is not JSON" in err
    outputs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [output["id"] for output in outputs] == [1, 2, 81, 5, 6, "last"]
    assert [sorted(output) for output in outputs[1:2]] == [["error", "id", "prompt"]]
    answered = [output for output in outputs if "error" not in output]
    assert [output["id"] for output in answered] == [1, 81, 5]
    for output in answered:
        assert set(output) == {"id", "prompt", "text", "token_ids", "finish_reason", "usage"}
        usage = output["usage"]
        assert usage["output_count"] == len(output["token_ids"])
        assert usage["accepted_count"] + usage["round_count"] - usage["output_count"] in (0, 1)
    assert "leaves no room for output" in outputs[-1]["error"]
    plain = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    assert [one.get("token_ids") for one in plain] == [one.get("token_ids") for one in outputs]
    assert all(one["usage"]["drafted_count"] == 0 for one in plain if "usage" in one)


async def test_up_prints_its_addresses_serves_the_same_by_http_and_stops_all_four() -> None:
    process = await start(*UP_ON_FREE_PORTS, "--http", "0", "--kv-memory", "64MiB")
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode().split() for _ in range(8)]
    assert [line[0] for line in lines] == ["coordinator", "draft", "target", "numerics", "http", *["metrics"] * 3]
    assert " ".join(lines[3][1:]).startswith("fast in float32: output equals Hugging Face")
    for component, (_, url) in zip(("coordinator", "draft", "target"), lines[5:], strict=True):
        with await asyncio.to_thread(urllib.request.urlopen, url) as scrape:
            assert f'paceline_start_time_seconds{{component="{component}"}}' in scrape.read().decode()
    coordinator, url = lines[0][1], lines[4][1]
    async with Client(coordinator) as grpc, httpx2.AsyncClient(base_url=url, timeout=60) as http:
        assert await by_http(http) == [one.token_ids for one in await asyncio.gather(*map(grpc.complete, QUESTIONS))]
    # Their ports tell nothing afterwards: other services on this machine may have taken them.
    services = psutil.Process(process.pid).children()
    assert len(services) == 4
    process.send_signal(signal.SIGINT)
    assert (await ended(process))[0] == 0
    assert not [one for one in services if one.is_running()]


async def by_http(http: httpx2.AsyncClient) -> list[list[int]]:
    """Ask `QUESTIONS` as OpenAI's clients do; return the ids."""

    async def answer(question: GenerationRequest) -> list[int]:
        assert isinstance(question.prompt, UserMessage)
        asked = {"max_tokens": question.max_new_tokens, "temperature": 0.7, "seed": 3, "return_token_ids": True}
        messages = [{"role": "user", "content": question.prompt.value}]
        found = (await http.post("/v1/chat/completions", json=asked | {"messages": messages})).json()
        ids: list[int] = found["choices"][0]["token_ids"]
        return ids

    return list(await asyncio.gather(*map(answer, QUESTIONS)))


@pytest.mark.review
@pytest.mark.long
@pytest.mark.parametrize("draft", ["none", "builtin:draft"])
async def test_every_service_under_up_may_be_killed_while_a_run_is_answered(draft: str, tmp_path: Path) -> None:
    """Review G2: nothing was reported or restarted. A run froze without its target and failed without its coordinator.

    All lines must be answered correctly, and `up` must still be complete.
    """
    roles = ["target", "coordinator", *([] if draft == "none" else ["draft"])]
    up = await start(*UP_ON_FREE_PORTS, "--draft-model", draft)
    assert up.stdout is not None
    addresses = [(await up.stdout.readline()).decode().split()[1] for _ in range(3)]
    lines = [json.dumps({"prompt": f"Tom has {n} apples and eats 2. How many are left?"}) for n in range(3, 43)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run = ["paceline", "run", "--input", str(tmp_path / "in.jsonl"), "--address", addresses[0], "--max-new-tokens=48"]
    disturbed = await start(*run, "--output", str(tmp_path / "disturbed.jsonl"))
    while not (tmp_path / "disturbed.jsonl.partial").exists():
        assert disturbed.returncode is None
        await asyncio.sleep(0.01)
    for role in roles:
        _service_of(up, role).kill()
        await said(up, f"{role} ended by signal 9; starting it again (1st time)")
        await said(up, f"{role} is back")
    status, _, err = await ended(disturbed)
    assert status == 0, err
    assert "40 of 40 lines answered" in err
    status, _, err = await paceline(*run[1:], "--output", str(tmp_path / "plain.jsonl"), "--no-speculation")
    assert status == 0, err
    outputs = [
        [json.loads(line)["token_ids"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("disturbed.jsonl", "plain.jsonl")
    ]
    assert len(outputs[0]) == 40
    assert outputs[0] == outputs[1]
    assert len(psutil.Process(up.pid).children()) == len(roles)
    # Ctrl-C arrives while a service waits for its next start.
    _service_of(up, roles[-1]).kill()
    await said(up, f"{roles[-1]} ended by signal 9; starting it again")
    up.send_signal(signal.SIGINT)
    assert (await ended(up))[0] == 0
    # Each service was started again with its port among its flags.
    ports = {address.rpartition(":")[2] for address in addresses} - {draft}
    assert not [one for one in psutil.process_iter(["cmdline"]) if ports & set(one.info["cmdline"] or ())]


@pytest.mark.long
async def test_a_target_over_ranks_is_started_anew_under_up_when_one_of_them_was_killed() -> None:
    flags = ["--target-model", "builtin:draft", "--draft-model", "none", "--target-tensor-parallel", "2"]
    up = await start(*UP_ON_FREE_PORTS, *flags)
    assert up.stdout is not None
    address = (await up.stdout.readline()).decode().split()[1]
    question = replace(QUESTIONS[0], max_new_tokens=200, ignore_end_tokens=True)
    async with Client(address) as client:
        expected = (await client.complete(question)).token_ids
        disturbed = asyncio.create_task(client.complete(question))
        while not (await client.describe()).live_sequence_count:
            await asyncio.sleep(0.01)
        (follower,) = psutil.Process(_service_of(up, "target").pid).children()
        follower.kill()
        await said(up, "starting it again (1st time)")
        await said(up, "target is back")
        assert (await disturbed).token_ids == expected
    up.send_signal(signal.SIGINT)
    assert (await ended(up))[0] == 0


def _service_of(up: asyncio.subprocess.Process, role: str) -> psutil.Process:
    module = role if role == "coordinator" else f"{role}_service"
    (service,) = (one for one in psutil.Process(up.pid).children() if module in one.cmdline())
    return service


async def test_services_do_not_outlive_a_killed_up_and_none_is_started_that_is_not_wanted() -> None:
    process = await start(*UP_ON_FREE_PORTS, "--draft-model", "none")
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode().split() for _ in range(3)]
    assert lines[1] == ["draft", "none"]
    async with Client(lines[0][1]) as client:
        assert len((await client.complete(replace(QUESTIONS[0], ignore_end_tokens=True))).tokens) == 24
    services = psutil.Process(process.pid).children()
    assert len(services) == 2
    process.kill()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, services, 60)
    assert (len(gone), alive) == (2, [])


def test_commands_say_what_is_wrong_in_one_line(
    tmp_path: Path, pairs: dict[str, PairOfCheckpoints], services_here: None
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}')
    for arguments, words in [
        (["generate", "x", "--address", "127.0.0.1:1", "--retry-for", "0"], "127.0.0.1:1"),
        (["generate", "x", "--draft-model", str(pairs["Llama"].target)], "different tokenizers"),
        (["run", "--input", str(tmp_path / "missing"), "--output", "out"], "missing cannot be read"),
        (["run", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "no/out")], "cannot be written"),
    ]:
        status, _, err = paceline_here(*arguments)
        assert status in (1, 2)
        assert words in " ".join(err.replace("│", " ").split())
        assert "Traceback" not in err


async def test_a_terminated_command_leaves_no_service_behind() -> None:
    process = await start("paceline", "generate", "x", "--max-new-tokens", "3000")
    while not (found := _children(process.pid)):
        await asyncio.sleep(0.05)
    process.terminate()
    await ended(process)
    assert not [pid for pid in found if _is_alive(pid)]


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
