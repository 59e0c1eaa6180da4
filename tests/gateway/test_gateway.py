"""The gateway over a coordinator with fake models: HTTP gives what gRPC gives, and bad input is refused."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from openai import AsyncOpenAI, InternalServerError
from prometheus_client import CollectorRegistry

from paceline.client import NO_RETRIES, Client
from paceline.errors import CallTimedOut
from paceline.gateway.config import GatewaySettings
from paceline.gateway.serving import running_gateway
from paceline.process.instruments import Instruments
from paceline.types import GenerationRequest, SamplingParameters, TokenIds
from tests.coordinators import fake_server, prompts
from tests.fakes.model_services import FakeDrafter, FakeVerifier, HeldVerifier, continuation
from tests.fakes.scripted_generator import ScriptedGenerator, pieces, scripted_url
from tests.fuzzing.bad_requests import MAX_BODY_BYTES, BadRequest, bad_requests
from tests.fuzzing.http_answers import answer_to, complaint
from tests.scrapes import value
from tests.waits import until

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Door:
    http: httpx2.AsyncClient
    url: str
    grpc: Client

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")


@asynccontextmanager
async def door(
    verifier: FakeVerifier | None = None, registry: CollectorRegistry | None = None, **asked: Any
) -> AsyncIterator[Door]:
    """Run a gateway over fake models; yield clients of it and of its coordinator, which counts in `registry`."""
    verifier, registry = verifier or FakeVerifier(), registry or CollectorRegistry()
    async with fake_server(FakeDrafter(0.7), verifier, registry, batch_size=4) as server:
        told = GatewaySettings(coordinator=server.address, port=0, **asked)
        async with (
            running_gateway(told, Instruments(CollectorRegistry())) as address,
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=30) as http,
            Client(server.address, NO_RETRIES) as grpc,
        ):
            yield Door(http, f"http://{address}", grpc)


def body(prompt: tuple[int, ...], **asked: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True, **asked}


async def events(http: httpx2.AsyncClient, asked: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, which must end as OpenAI's do."""
    async with http.stream("POST", COMPLETIONS, json=asked | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ids(chunks: list[Any]) -> list[int]:
    return [one for chunk in chunks for choice in chunk["choices"] for one in choice.get("token_ids") or ()]


async def test_the_same_ids_come_by_http_streamed_or_not_as_by_grpc() -> None:
    async with door() as it:
        for prompt in prompts(12):
            expected = continuation(prompt, 20)
            whole = (await it.http.post(COMPLETIONS, json=body(prompt))).json()
            assert whole["choices"][0]["token_ids"] == expected
            assert ids(await events(it.http, body(prompt))) == expected
            assert (await it.grpc.complete(GenerationRequest(TokenIds(prompt), 20))).token_ids == expected
            usage = whole["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(expected))


async def test_a_sampled_output_has_the_ids_of_its_seed_by_either_door() -> None:
    sampling = SamplingParameters(temperature=0.8, top_p=0.9, top_k=20)
    async with door() as it:
        asked = body((5, 6, 7), temperature=0.8, top_p=0.9, top_k=20, seed=11)
        expected = await it.grpc.complete(GenerationRequest(TokenIds((5, 6, 7)), 20, sampling=sampling, seed=11))
        assert (await it.http.post(COMPLETIONS, json=asked)).json()["choices"][0]["token_ids"] == expected.token_ids


async def test_several_prompts_and_outputs_have_the_places_that_openai_gives_them() -> None:
    asked = {**body((4, 5)), "prompt": [[4, 5], [6, 7, 8]], "n": 2}
    async with door() as it:
        choices = (await it.http.post(COMPLETIONS, json=asked)).json()["choices"]
        streamed = await events(it.http, asked)
    expected = [continuation((4, 5), 20)] * 2 + [continuation((6, 7, 8), 20)] * 2
    assert [one["token_ids"] for one in sorted(choices, key=lambda one: one["index"])] == expected
    for index, output in enumerate(expected):
        own = [{"choices": [one for one in chunk["choices"] if one["index"] == index]} for chunk in streamed]
        assert ids(own) == output


async def test_rounds_are_told_with_what_drafted_each_token() -> None:
    async with door() as it:
        chunks = await events(it.http, body((4, 5, 6), paceline={"tell": True}))
    told = [chunk["paceline"] for chunk in chunks if "tokens" in (chunk.get("paceline") or {})]
    assert [token["id"] for one in told for token in one["tokens"]] == continuation((4, 5, 6), 20)
    rounds = [one["round"] for one in told if one.get("round")]
    assert rounds and all(one["accepted"] <= one["drafted"] for one in rounds)
    assert sum(one["accepted"] for one in rounds) == sum(token["accepted"] for one in told for token in one["tokens"])
    last = chunks[-1]["paceline"]
    assert last["accepted"] == sum(one["accepted"] for one in rounds)
    assert last["rounds"] == len(rounds)


async def test_the_openai_client_reads_both_forms_and_the_errors() -> None:
    async with door() as it, AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        whole = await client.completions.create(model=model, prompt=[4, 5, 6], max_tokens=20, temperature=0)
        assert whole.usage and whole.usage.completion_tokens == len(continuation((4, 5, 6), 20))
        stream = await client.completions.create(model=model, prompt=[4, 5, 6], max_tokens=20, stream=True)
        assert [one.choices[0].finish_reason async for one in stream if one.choices][-1] in ("length", "stop")
        with pytest.raises(Exception, match="max_tokens"):
            await client.completions.create(model=model, prompt=[4], max_tokens=-1)
        with pytest.raises(Exception, match="another.* is not served"):
            await client.completions.create(model="another", prompt=[4], max_tokens=1)


async def test_the_openai_client_skips_what_keeps_a_stream_from_being_silent() -> None:
    said = ("Hel", "lo", "!")
    async with (
        scripted_url(ScriptedGenerator(pieces(*said), pause_s=0.02), silence_s=0.001) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        stream = await client.completions.create(model="target", prompt="a", stream=True)
        assert [one.choices[0].text async for one in stream] == [*said]


async def test_the_openai_client_does_not_ask_again_for_an_answer_that_took_too_long() -> None:
    """It asked twice more by itself: an answer that nobody waited for had three times the time."""
    generator = ScriptedGenerator(refuses=CallTimedOut("late"))
    async with (
        scripted_url(generator) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client,
    ):
        with pytest.raises(InternalServerError, match="did not end within"):
            await client.completions.create(model="target", prompt="a")
    assert len(generator.asked) == 1


async def test_bad_requests_get_a_status_of_400s_and_the_error_form_and_the_gateway_stays_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn: list[BadRequest] = []

    @settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
    @given(bad_requests())
    def draw(one: BadRequest) -> None:
        drawn.append(one)

    draw()
    async with door(max_body_bytes=MAX_BODY_BYTES) as it:
        for one in drawn:
            answer = await answer_to(it.address, one.content)
            assert not complaint(answer), one
        right = (await it.http.post(COMPLETIONS, json=body((4, 5)))).json()
        assert right["choices"][0]["token_ids"] == continuation((4, 5), 20)
        assert (await it.http.get("/health")).status_code == 200
    assert not [one.message for one in caplog.records if one.levelno >= logging.ERROR]


async def test_a_body_that_is_far_too_large_gets_its_answer() -> None:
    """A connection that is closed amid its request is reset, and the answer lost."""
    async with door(max_body_bytes=1000) as it:
        answer = await it.http.post(COMPLETIONS, json={"prompt": "x" * (16 << 20)})
    assert answer.status_code == 413


async def test_chunks_that_break_after_an_answer_end_the_connection_quietly(caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    async with door() as it:
        reader, writer = await asyncio.open_connection(*it.address.split(":"))
        writer.write(head.encode())
        status, _, length = (await reader.readuntil(b"\r\n\r\n")).partition(b"content-length: ")
        assert b" 415 " in status
        await reader.readexactly(int(length.split()[0]))
        writer.write(b"no size\r\n")
        assert await reader.read() == b""
        writer.close()
    assert [one.message for one in caplog.records] == ["Invalid HTTP request received."]


async def test_paths_methods_sizes_and_tokens_are_refused_in_the_same_form(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    (tmp_path / "tokens").chmod(0o600)
    async with door(max_body_bytes=1000, token_file=tmp_path / "tokens") as it:
        shown = {"authorization": "Bearer secret"}
        for answer, status in [
            (await it.http.get("/nowhere", headers=shown), 404),
            (await it.http.get(COMPLETIONS, headers=shown), 405),
            (await it.http.post(COMPLETIONS, json={"prompt": "x" * 2000}, headers=shown), 413),
            (await it.http.post(COMPLETIONS, json=body((4,))), 401),
            (await it.http.get("/cluster", headers={"authorization": "Bearer wrong"}), 401),
        ]:
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
        assert (await it.http.post(COMPLETIONS, json=body((4,)), headers=shown)).status_code == 200
        assert (await it.http.get("/health")).status_code == 200
        assert (await it.http.get("/")).headers["content-security-policy"].startswith("default-src 'self'")


async def test_a_format_that_cannot_be_enforced_is_refused_by_its_name() -> None:
    async with door() as it:
        answer = await it.http.post(COMPLETIONS, json=body((4,), response_format={"type": "json_object"}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


async def test_a_client_that_leaves_ends_its_request() -> None:
    verifier, registry = HeldVerifier(1), CollectorRegistry()
    async with door(verifier, registry) as it:
        asked = body((4, 5), max_tokens=None, ignore_eos=True, stream=True, n=64)
        async with it.http.stream("POST", COMPLETIONS, json=asked) as response:
            await anext(response.aiter_lines())
        await until(lambda: value(registry, "requests_total", code="CANCELLED") == 1)
        verifier.open.set()
        while (await it.grpc.describe()).live_sequence_count:
            await asyncio.sleep(0.01)
    assert len(verifier.calls) == 2, "only the round that it was in ends"


async def test_two_hundred_streams_at_once_all_have_their_own_output() -> None:
    many = [(4 + n % 40, 5 + n // 40) for n in range(200)]
    async with door() as it:
        answers = await asyncio.gather(*(events(it.http, body(one, max_tokens=8)) for one in many))
    assert [ids(one) for one in answers] == [continuation(one, 8) for one in many]
