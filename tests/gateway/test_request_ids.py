"""The id of a request by HTTP: it is its client's own or drawn, and stands in its answer, the logs and the spans."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline.errors import InvalidRequest, Overloaded
from tests.coordinators import fake_server
from tests.fakes.model_services import FakeDrafter, FakeVerifier
from tests.fakes.scripted_generator import CHAT, COMPLETIONS, ScriptedGenerator, pieces, scripted_door
from tests.gateway.test_serving import NOWHERE, client, gateway

OWN = "Req-1.a_b:/+=@~Z"
ASKED: dict[str, Any] = {"prompt": [4, 5], "max_tokens": 3}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/health/live", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/", None, 200),
        ("POST", COMPLETIONS, {"prompt": "a"}, 200),
        ("POST", COMPLETIONS, {"prompt": "a", "stream": True}, 200),
        ("POST", CHAT, {"messages": []}, 400),
        ("POST", COMPLETIONS, {"prompt": "a", "model": "none"}, 404),
        ("GET", "/nowhere", None, 404),
        ("GET", CHAT, None, 405),
        ("POST", COMPLETIONS, None, 415),
    ],
)
async def test_every_answer_has_the_id_that_its_client_gave_or_another(
    method: str, path: str, body: Any, status: int
) -> None:
    drawn = []
    async with scripted_door(ScriptedGenerator(pieces("a"))) as door:
        for given in ({"x-request-id": OWN}, {}, {}):
            answer = await door.http.request(method, path, json=body, headers=given)
            assert answer.status_code == status
            (found,) = answer.headers.get_list("x-request-id")
            if given:
                assert found == OWN
            else:
                drawn.append(found)
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in drawn)
    assert len(set(drawn)) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", [Overloaded("full"), InvalidRequest("wrong", field="prompt"), RuntimeError("odd")])
async def test_an_error_of_a_coordinator_has_its_id_too(refusal: Any, stream: bool) -> None:
    async with scripted_door(ScriptedGenerator(refuses=refusal)) as door:
        with capture_logs() as lines:
            asked = {"prompt": "a", "stream": stream}
            answer = await door.http.post(COMPLETIONS, json=asked, headers={"x-request-id": OWN})
    assert answer.status_code >= 400
    assert answer.headers["x-request-id"] == OWN
    assert lines and all(one["request_id"] == OWN for one in lines)


async def test_an_error_that_nobody_expected_of_a_path_has_an_id_that_is_in_the_log() -> None:
    """It is answered outside of all that is within the application."""
    broken: Any = RuntimeError("odd")
    generator = ScriptedGenerator()
    async with scripted_door(generator) as door:
        generator.is_away = broken
        with capture_logs() as lines:
            answer = await door.http.get("/cluster")
    assert answer.status_code == 500
    assert [one["request_id"] for one in lines] == [answer.headers["x-request-id"]]


async def test_who_shows_no_token_gets_an_id_that_is_in_the_log_and_that_pages_may_read(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\n")
    named = ("https://a.example",)
    async with scripted_door(ScriptedGenerator(), tokens=tmp_path / "tokens", cors_origins=named) as door:
        with capture_logs() as lines:
            answer = await door.http.post(COMPLETIONS, json={}, headers={"origin": named[0]})
    assert answer.status_code == 401
    assert [one["request_id"] for one in lines] == [answer.headers["x-request-id"]]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("given", [b"", b"a b", b'a"b', b"a\xe9", b"x" * 129, b"a\tb"])
async def test_an_id_that_no_header_or_line_should_hold_is_replaced(given: bytes) -> None:
    generator = ScriptedGenerator(pieces("a"))
    async with scripted_door(generator) as door:
        with capture_logs() as lines:
            answer = await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers=[(b"x-request-id", given)])
    found = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", found)
    assert [one["request_id"] for one in lines] == [found] == [one["x-request-id"] for one in generator.headers]


async def test_a_span_of_the_gateway_names_its_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with scripted_door(ScriptedGenerator(pieces("a")), tracer=provider.get_tracer("test")) as door:
        await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": OWN})
    (span,) = exporter.get_finished_spans()
    assert span.attributes and span.attributes["paceline.request_id"] == OWN


@pytest.mark.parametrize("prompt_tokens", [2, 40_000], ids=["of a shared stream", "of a call of its own"])
async def test_a_coordinator_behind_the_gateway_calls_a_request_as_its_client_does(prompt_tokens: int) -> None:
    asked = ASKED | {"prompt": [300] * prompt_tokens}
    async with (
        fake_server(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as server,
        gateway(server.address) as address,
        client(address) as http,
    ):
        with capture_logs() as lines:
            answer = await http.post(COMPLETIONS, json=asked, headers={"x-request-id": OWN})
            while len([one for one in lines if one["event"] == "request ended"]) < 2:
                await asyncio.sleep(0.01)
    assert [one["request_id"] for one in lines if one["event"] == "request ended"] == [OWN, OWN]
    if answer.status_code == 200:
        assert answer.json()["paceline"]["request_id"] == OWN


async def test_what_is_no_http_is_answered_with_an_id_that_is_in_the_log() -> None:
    async with gateway(NOWHERE) as address:
        with capture_logs() as lines:
            reader, writer = await asyncio.open_connection(*address.split(":"))
            writer.write(b"no http\r\n\r\n")
            answer = await reader.read()
            writer.close()
    (found,) = re.findall(rb"x-request-id: ([0-9a-f]{16})\r\n", answer)
    assert answer.startswith(b"HTTP/1.1 400")
    assert [one["request_id"] for one in lines if "HTTP" in one["event"]] == [found.decode()]
