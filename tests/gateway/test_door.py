"""Who gets in, what is said to those who do not, and what a request leaves behind."""

import asyncio
import gc
import gzip
import re
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from paceline.chat_template import Conversation
from paceline.errors import (
    CallTimedOut,
    InvalidRequest,
    MessageTooLarge,
    MethodNotFound,
    ModelChanged,
    NoChoice,
    NotDescribed,
    Overloaded,
    PacelineError,
    PeerFailed,
    PeerUnavailable,
    PermissionDenied,
    PromptTooLong,
    TokenizerNotFound,
    Unauthenticated,
)
from paceline.gateway import endpoint
from paceline.gateway.apis import APIS, COMPLETION
from paceline.gateway.endpoint import Endpoint
from paceline.gateway.errors import HttpError, http_error
from paceline.gateway.formats import response_format_of
from paceline.gateway.generating import MOST_OUTPUTS, generate_all
from paceline.gateway.reading import LONG_BODY_BYTES
from paceline.gateway.sse import DONE, PING, EventStream
from paceline.types import Chat, ChatMessage, GenerationRequest, OutputPiece, ResponseFormat, Text
from tests.fakes.model_services import describe
from tests.fakes.scripted_generator import COMPLETIONS, ScriptedGenerator, pieces, scripted_door
from tests.scrapes import by_label, value

FORCED = {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "required"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (InvalidRequest("max_new_tokens is 9; give less", field="max_new_tokens"), 400, ("max_tokens", None)),
        (InvalidRequest("top_p is 0", field="sampling.top_p"), 400, ("top_p", None)),
        (PromptTooLong("no room", field="max_new_tokens"), 400, ("max_tokens", "context_length_exceeded")),
        (InvalidRequest("wrong", field="drafting.draft_model"), 400, ("paceline.draft_model", None)),
        (TokenizerNotFound("none"), 400, (None, None)),
        (MessageTooLarge("large"), 413, (None, "request_too_large")),
        (Overloaded("full", retry_after_s=2.3), 429, (None, "rate_limit_exceeded")),
        (ModelChanged("other"), 503, (None, "model_changed")),
        (PeerUnavailable("away"), 503, (None, "unavailable")),
        (CallTimedOut("late"), 504, (None, "timeout")),
        (Unauthenticated("who"), 502, (None, "bad_gateway")),
        (NoChoice("none"), 500, (None, None)),
        (PeerFailed("broken"), 500, (None, None)),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_errors_of_coordinators_have_openais_form(
    error: PacelineError, status: int, expected: tuple[str | None, str | None]
) -> None:
    async with scripted_door(ScriptedGenerator(refuses=error)) as door:
        answers = [await door.complete(), await door.complete(stream=True), await door.chat()]
    for answer in answers:
        assert answer.status_code == status
        told = answer.json()["error"]
        assert (told["param"], told["code"]) == expected
        assert told["type"] == {4: "invalid_request_error", 5: "server_error"}[status // 100] or status == 429
    if status in (429, 503):
        assert answers[0].headers["retry-after"] == ("3" if status == 429 else "1")


@pytest.mark.parametrize(
    ("field", "message", "param", "told"),
    [
        ("max_new_tokens", "max_new_tokens is 9; give less", "max_tokens", "max_tokens is 9; give less"),
        (
            "sampling.min_new_tokens",
            "min_new_tokens is 9, more than the 4 of max_new_tokens",
            "min_tokens",
            "min_tokens is 9, more than the 4 of max_tokens",
        ),
        ("sampling.logit_bias", "sampling.logit_bias holds 9", "logit_bias", "logit_bias holds 9"),
        ("prompt.token_ids", "prompt.token_ids holds 9", "prompt", "prompt holds 9"),
        ("prompt", "send the prompt as token_ids", "prompt", "send the prompt as token_ids"),
        (
            "stop_strings",
            "stop_strings need a tokenizer; use stop_token_ids",
            "stop",
            "stop need a tokenizer; use stop_token_ids",
        ),
        ("response_format", "and ignore_end_tokens are both set", "response_format", "and ignore_eos are both set"),
        ("echo_prompt", "echo_prompt is set for 9 tokens", "echo", "echo is set for 9 tokens"),
        (
            "drafting.in_order",
            "drafting.in_order is set and drafting.sources is empty",
            "paceline.in_order",
            "paceline.in_order is set and paceline.sources is empty",
        ),
        ("chat.messages", "chat.messages holds 'x'; give JSON", "messages", "messages holds 'x'; give JSON"),
        (
            "chat.messages[1].tool_calls[0].arguments",
            "chat.messages[1].tool_calls[0].arguments holds 'x'",
            "messages[1].tool_calls[0].function.arguments",
            "messages[1].tool_calls[0].function.arguments holds 'x'",
        ),
    ],
)
async def test_an_error_names_fields_as_the_body_does(field: str, message: str, param: str, told: str) -> None:
    async with scripted_door(ScriptedGenerator(refuses=InvalidRequest(message, field=field))) as door:
        error = (await door.complete()).json()["error"]
    assert (error["param"], error["message"]) == (param, told)


def test_an_answer_that_is_too_large_is_told_in_the_names_of_the_body() -> None:
    told = http_error(MessageTooLarge("too large; ask for a lower top_logprob_count, or leave echo_prompt out")).message
    assert told == "too large; ask for a lower top_logprobs, or leave echo out"


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_a_variable_of_a_template_and_the_field_it_comes_from_are_told_apart(name: str) -> None:
    """Both have the same name in a body, and clients were told to give messages as messages."""
    chat = Chat((ChatMessage("user", "hi"),), template_arguments=f'{{"{name}": []}}')
    with pytest.raises(InvalidRequest) as found:
        Conversation.of(chat)
    error = http_error(found.value)
    assert error.param == "chat_template_kwargs"
    expected = f"the variable '{name}'; leave it out, and give it as {name}, beside chat_template_kwargs"
    assert error.message == f"chat_template_kwargs sets {expected}"


async def test_a_prompt_that_is_refused_is_named_as_the_body_has_it() -> None:
    async with scripted_door(ScriptedGenerator(refuses=InvalidRequest("prompt is too long", field="prompt"))) as door:
        answers = [await door.complete(), await door.chat()]
    assert [one.json()["error"]["param"] for one in answers] == ["prompt", "messages"]


@pytest.mark.parametrize(
    ("asked", "ours", "theirs"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"guided_regex": "(("}, "response_format", "guided_regex"),
        ({"structured_outputs": {"grammar": "start: a"}}, "response_format", "structured_outputs.grammar"),
        (FORCED, "response_format", "tool_choice"),
        ({"max_completion_tokens": 9}, "max_new_tokens", "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_that_has_several_names_is_named_as_the_body_has_it(
    asked: dict[str, Any], ours: str, theirs: str, stream: bool
) -> None:
    refusal = InvalidRequest(f"{ours} cannot be followed: it is wrong", field=ours)
    async with scripted_door(ScriptedGenerator(refuses=refusal)) as door:
        error = (await door.chat(**asked, stream=stream)).json()["error"]
    assert (error["param"], error["message"]) == (theirs, f"{theirs} cannot be followed: it is wrong")


async def test_log_probabilities_are_called_what_either_body_calls_them() -> None:
    """Completions were told of a field that they have not."""
    refusal = InvalidRequest("top_logprob_count is 30; give 0 to 20", field="top_logprob_count")
    async with scripted_door(ScriptedGenerator(refuses=refusal)) as door:
        errors = [(await one).json()["error"] for one in (door.complete(), door.chat())]
    assert [one["param"] for one in errors] == ["logprobs", "top_logprobs"]
    assert [one["message"].split()[0] for one in errors] == ["logprobs", "top_logprobs"]


async def test_an_error_amid_a_stream_is_its_last_event() -> None:
    async with scripted_door(ScriptedGenerator(pieces("a", "b")[:1], fails=PeerUnavailable("away"))) as door:
        answer = await door.complete(stream=True)
    first, last = [line for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert '"text":"a"' in first
    assert '"message": "away"' in last and "[DONE]" not in answer.text


async def test_an_unexpected_error_tells_nothing_of_itself() -> None:
    error: Any = RuntimeError("secret")
    async with scripted_door(ScriptedGenerator(refuses=error)) as door:
        with capture_logs():
            answer = await door.complete()
    assert answer.status_code == 500
    assert "secret" not in answer.text and answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_does_not_say_it_is_json_is_refused(media_type: str) -> None:
    async with scripted_door(ScriptedGenerator()) as door:
        answer = await door.http.post(COMPLETIONS, content=b"{}", headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


async def test_a_body_that_is_compressed_is_refused_as_such() -> None:
    """It was JSON with an error in its first character."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with scripted_door(ScriptedGenerator()) as door:
        answer = await door.http.post(COMPLETIONS, content=gzip.compress(b"{}"), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")


async def test_a_body_without_a_length_is_refused_once_it_is_too_large() -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    async with scripted_door(ScriptedGenerator(), max_body_bytes=5000) as door:
        answer = await door.http.post(COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_long_body_is_taken() -> None:
    generator = ScriptedGenerator(pieces("a"))
    async with scripted_door(generator) as door:
        assert (await door.complete(prompt=[5] * 100_000)).status_code == 200
    assert generator.asked[0].prompt.values == (5,) * 100_000  # type: ignore[union-attr]


async def test_a_long_body_is_converted_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody waited while the tools of one body were written into the format of a forced call."""
    threads: list[threading.Thread] = []

    def noted(*asked: Any) -> ResponseFormat | None:
        threads.append(threading.current_thread())
        return response_format_of(*asked)

    monkeypatch.setattr("paceline.gateway.requests.response_format_of", noted)
    tools = [{"type": "function", "function": {"name": "a", "description": "x" * LONG_BODY_BYTES}}]
    async with scripted_door(ScriptedGenerator(pieces("a"))) as door:
        assert (await door.chat(tools=tools, tool_choice="required")).status_code == 200
        assert (await door.chat(tools=tools, tool_choice="required", model="another")).status_code == 404
    assert len(threads) == 1 and threading.current_thread() not in threads


async def test_names_that_are_not_served_are_refused() -> None:
    async with scripted_door(ScriptedGenerator(pieces("a"))) as door:
        for model in (None, "", "target"):
            assert (await door.complete(model=model)).json()["model"] == "target"
        answer = await door.complete(model="other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await door.http.get("/v1/models/target")).json()["id"] == "target"
        assert (await door.http.get("/v1/models/other")).status_code == 404


async def test_a_path_with_a_slash_too_many_is_none() -> None:
    """It was answered with a redirection, which loses the body with some clients."""
    async with scripted_door(ScriptedGenerator(pieces("a"))) as door:
        answer = await door.http.post("/v1/completions/", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
        assert (await door.http.get("/v1/models/")).status_code == 404


async def test_a_model_tells_how_long_a_sequence_it_takes() -> None:
    async with scripted_door(ScriptedGenerator()) as door:
        (listed,) = (await door.http.get("/v1/models")).json()["data"]
        assert (await door.http.get("/v1/models/target")).json() == listed
        assert listed["max_model_len"] == describe("target").longest_sequence > 0
    async with scripted_door(ScriptedGenerator(is_away=PeerUnavailable("away")), names=("gpt",)) as door:
        assert (await door.http.get("/v1/models/gpt")).json()["max_model_len"] is None


async def test_given_names_take_the_place_of_the_targets_own() -> None:
    async with scripted_door(ScriptedGenerator(pieces("a")), names=("gpt", "x/y")) as door:
        assert [one["id"] for one in (await door.http.get("/v1/models")).json()["data"]] == ["gpt", "x/y"]
        assert (await door.http.get("/v1/models/x/y")).json()["id"] == "x/y"
        assert [(await door.complete(model=name)).json()["model"] for name in (None, "x/y")] == ["gpt", "x/y"]
        assert (await door.complete(model="target")).status_code == 404


async def test_while_no_coordinator_answers_the_gateway_is_not_well_but_asks() -> None:
    generator = ScriptedGenerator(pieces("a"), is_away=PeerUnavailable("away"))
    async with scripted_door(generator) as door:
        assert (await door.http.get("/health")).status_code == 503
        assert (await door.http.get("/health/live")).status_code == 200
        assert (await door.http.get("/cluster")).status_code == 503
        assert (await door.http.get("/v1/models")).json()["data"] == []
        assert (await door.http.get("/v1/models/any")).status_code == 404
        assert (await door.complete(model="any")).json()["model"] == "any"
        assert (await door.complete()).json()["model"] == "target"


async def test_who_asks_for_health_learns_no_address_and_the_log_says_why_once(tmp_path: Path) -> None:
    """Whoever could reach the port was told gRPC's words, with the coordinator's address; the log had none of them."""
    (tmp_path / "tokens").write_text("one\n")
    away = PeerUnavailable("failed to connect: ipv4:10.1.2.3:7700")
    generator = ScriptedGenerator(is_away=away)
    with capture_logs() as lines:
        async with scripted_door(generator, tokens=tmp_path / "tokens") as door:
            await door.gateway.model.look()
            answer = await door.http.get("/health")
            assert answer.status_code == 503 and "10.1.2.3" not in answer.text
            generator.is_away = None
            await door.gateway.model.look()
            assert (await door.http.get("/health")).status_code == 200
    told = [(one["event"], one.get("error")) for one in lines if "coordinator" in one["event"]]
    assert told == [("no coordinator serves the gateway", str(away)), ("a coordinator serves the gateway again", None)]


async def test_a_gateway_whose_token_is_refused_is_not_well() -> None:
    """It was ready, so a rollout with a wrong token took the place of gateways that worked, and all requests failed."""
    async with scripted_door(ScriptedGenerator(is_away=Unauthenticated("no valid token"))) as door:
        assert (await door.http.get("/health")).status_code == 503
    async with scripted_door(ScriptedGenerator(is_away=NotDescribed("--describe false"))) as door:
        assert (await door.http.get("/health")).status_code == 200


@pytest.mark.parametrize("refusal", [PermissionDenied("RBAC: access denied"), MethodNotFound("no such method")])
async def test_a_gateway_that_is_not_let_in_or_calls_another_service_is_not_well(refusal: PacelineError) -> None:
    """A proxy's refusal, and the target's address in place of the coordinator's, left it ready; all requests failed."""
    async with scripted_door(ScriptedGenerator(is_away=refusal)) as door:
        assert (await door.http.get("/health")).status_code == 503


async def test_a_gateway_that_drains_takes_nothing_new_and_finishes_what_it_has() -> None:
    held = asyncio.Event()
    async with scripted_door(ScriptedGenerator(pieces("a", "b"), waits_for=held)) as door:
        running = asyncio.create_task(door.complete())
        while door.gateway.running.is_idle:
            await asyncio.sleep(0)
        draining = asyncio.create_task(door.gateway.running.drain(60))
        while not door.gateway.running.is_draining:
            await asyncio.sleep(0)
        assert (await door.http.get("/health")).status_code == 503
        assert (await door.http.get("/health/live")).status_code == 200
        refused = await door.complete()
        # Else who keeps its connection would ask here again, and not reach another.
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        held.set()
        await draining
        ended = await running
        assert ended.json()["choices"][0]["text"] == "ab"
        assert ended.headers["connection"] == "close", "the next request on it would be refused"


async def test_more_requests_than_it_takes_are_to_come_again() -> None:
    async with scripted_door(ScriptedGenerator(), most=0) as door:
        answer = await door.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_an_error_that_is_given_again_and_again_keeps_nothing_of_its_requests() -> None:
    """Each time it was raised it kept the frames that it passed, with the request and what came of its body."""
    async with scripted_door(ScriptedGenerator(), most=0) as door:
        for _ in range(3):
            assert (await door.complete()).status_code == 429
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is HttpError and one.__traceback__]


async def test_bodies_that_are_together_more_than_it_takes_are_to_come_again() -> None:
    """A hundred of the largest bodies at once were more than a pod's memory, and all its streams ended."""
    held, content = asyncio.Event(), "a" * 6000
    generator = ScriptedGenerator(pieces("a"), waits_for=held)
    async with scripted_door(generator, most_bodies_bytes=10_000) as door:
        first = asyncio.create_task(door.complete(prompt=content))
        while not generator.asked:
            await asyncio.sleep(0)
        refused = await door.complete(prompt=content)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        second = asyncio.create_task(door.complete(prompt="small"))
        held.set()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert (await door.complete(prompt=content)).status_code == 200


async def test_a_refused_request_is_counted_and_has_its_line() -> None:
    """A gateway that refused nearly everything showed no more than what it took."""
    registry = CollectorRegistry()
    async with scripted_door(ScriptedGenerator(), most=0, registry=registry) as door:
        with capture_logs() as lines:
            await door.complete()
            await door.gateway.running.drain(60)
            await door.complete()
    assert by_label(registry, "gateway_requests_total", "status") == {"429": 1, "503": 1}
    assert value(registry, "gateway_requests_running") == 0
    assert [(one["event"], one["status"], one["error"]) for one in lines] == [
        ("request ended", 429, "rate_limit_exceeded"),
        ("request ended", 503, None),
    ]


async def test_a_gateway_has_series_of_failures_before_there_are_any() -> None:
    """A rate misses the step from nothing to one."""
    registry = CollectorRegistry()
    async with scripted_door(ScriptedGenerator(), registry=registry):
        for api in APIS:
            assert value(registry, "gateway_requests_total", path=api.path, status="503") == 0


async def test_the_first_failure_of_several_prompts_ends_them_all() -> None:
    generator = ScriptedGenerator(refuses=Overloaded("full"))
    async with scripted_door(generator) as door:
        assert (await door.complete(prompt=["a", "b", "c"])).status_code == 429
    assert generator.ended_count == len(generator.asked)


@dataclass
class CountedOutputs(ScriptedGenerator):
    """Counts the outputs that are under way at once."""

    under_way: int = 0
    most: int = 0
    timeouts_s: list[float] = field(default_factory=list)

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None, **how: Any
    ) -> AsyncGenerator[OutputPiece, None]:
        self.timeouts_s.append(timeout_s or 0.0)
        self.under_way += request.completion_count
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0.001)  # the others begin meanwhile
            async with aclosing(super().generate(request, **how)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.under_way -= request.completion_count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt_count", "n"), [(256, 1), (40, 64), (5, 128), (9, 100)])
async def test_any_number_of_prompts_and_outputs_is_asked_for_a_few_at_a_time(
    prompt_count: int, n: int, stream: bool
) -> None:
    """A coordinator's queue refused more than a thousand at once, however little it had to do."""
    generator = CountedOutputs(pieces("a"))
    async with scripted_door(generator) as door:
        answer = await door.complete(prompt=["hi"] * prompt_count, n=n, stream=stream)
    assert answer.status_code == 200
    assert answer.text.count('"finish_reason":"stop"') == prompt_count * n
    assert MOST_OUTPUTS - n < generator.most <= MOST_OUTPUTS
    assert generator.under_way == 0


async def test_outputs_that_wait_for_others_have_what_is_left_of_the_time() -> None:
    generator = CountedOutputs(pieces("a"))
    async with scripted_door(generator, timeout_s=60) as door:
        await door.complete(prompt=["hi"] * 5, n=128)
    *_, last = generator.timeouts_s
    assert 0 < last < min(generator.timeouts_s[:-1]) <= 60


async def test_an_output_that_came_too_late_is_told_the_time_of_the_whole_answer() -> None:
    """One that waited for others had been told what was left for it."""
    generator = ScriptedGenerator(refuses=CallTimedOut("the output did not end within 0.25 s"))
    async with scripted_door(generator, timeout_s=60) as door:
        error = (await door.complete(prompt=["hi"] * 5)).json()["error"]
    assert error["message"] == "the output did not end within 60 s"


async def test_prompts_that_wait_for_others_are_not_asked_for_after_a_failure() -> None:
    generator = CountedOutputs(refuses=Overloaded("full"))
    async with scripted_door(generator) as door:
        assert (await door.complete(prompt=["hi"] * 100, n=128)).status_code == 429
    assert (generator.ended_count, generator.under_way) == (2, 0)


async def test_a_call_that_is_cancelled_ends_all_that_is_under_way_and_asks_for_no_more() -> None:
    generator = CountedOutputs(pieces("a"), waits_for=asyncio.Event())

    async def deliver(*_: Any) -> None: ...

    requests = [GenerationRequest(Text("hi"), completion_count=64)] * 9
    call = asyncio.create_task(generate_all(generator, requests, deliver, lambda *_: None, 60))
    while len(generator.asked) < 4:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (len(generator.asked), generator.under_way) == (4, 0)


async def test_without_tokens_only_health_and_the_page_are_open(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\ntwo\n")
    async with scripted_door(ScriptedGenerator(pieces("a")), tokens=tmp_path / "tokens") as door:
        with capture_logs():
            for path in ("/v1/models", "/metrics", "/cluster", "/nowhere"):
                answer = await door.http.get(path)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/", "/health", "/health/live"):
            assert (await door.http.get(path)).status_code == 200
        for scheme in ("Bearer", "bearer"):
            shown = {"authorization": f"{scheme} two"}
            assert (await door.http.get("/v1/models", headers=shown)).status_code == 200


async def test_pages_of_other_origins_may_call_only_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one\n")
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asks |= {"access-control-request-headers": "authorization,content-type"}
    async with scripted_door(ScriptedGenerator(), tokens=tmp_path / "tokens") as door:
        with capture_logs():
            assert "access-control-allow-origin" not in (await door.http.options(COMPLETIONS, headers=asks)).headers
    named = ("https://a.example",)
    async with scripted_door(ScriptedGenerator(), tokens=tmp_path / "tokens", cors_origins=named) as door:
        answer = await door.http.options(COMPLETIONS, headers=asks)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, named[0])
        with capture_logs():
            refused = await door.http.post(COMPLETIONS, json={}, headers={"origin": named[0]})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, named[0])
        assert refused.headers["access-control-expose-headers"] == "retry-after, x-request-id"


async def test_a_request_is_part_of_its_callers_trace_and_says_so() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with scripted_door(ScriptedGenerator(pieces("a")), tracer=provider.get_tracer("test")) as door:
        answer = await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"traceparent": PARENT})
    (span,) = exporter.get_finished_spans()
    assert span.parent and f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.name == f"POST {COMPLETIONS}"
    assert span.attributes and span.attributes["http.response.status_code"] == 200
    assert answer.json()["paceline"]["trace_id"] == PARENT.split("-")[1]


async def test_a_traced_request_carries_no_header_on_that_is_too_long_for_metadata() -> None:
    """Coordinators refused its call for the size, which was told as being full."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    long = ",".join(f"vendor{number}={'x' * 200}" for number in range(30))
    async with scripted_door(ScriptedGenerator(pieces("a")), tracer=provider.get_tracer("test")) as door:
        for state in (long, "vendor=1"):
            sent = {"traceparent": PARENT, "tracestate": state}
            await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers=sent)
    spans = exporter.get_finished_spans()
    assert [f"{one.context.trace_id:032x}" for one in spans] == [PARENT.split("-")[1]] * 2
    assert [one.context.trace_state.to_header() for one in spans] == ["", "vendor=1"]


async def test_a_span_names_the_scheme_that_its_request_came_by() -> None:
    """It was http behind TLS too."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with scripted_door(ScriptedGenerator(pieces("a")), tracer=provider.get_tracer("test")) as door:
        for scheme in ("http", "https"):
            await door.http.post(f"{scheme}://gateway{COMPLETIONS}", json={"prompt": "a"})
    schemes = [one.attributes and one.attributes["url.scheme"] for one in exporter.get_finished_spans()]
    assert schemes == ["http", "https"]


async def test_what_a_traced_request_leaves_names_its_trace() -> None:
    """Neither its line nor its times did, and nobody could ask for the form that tells them."""
    tracer, registry = TracerProvider().get_tracer("test"), CollectorRegistry()
    async with scripted_door(ScriptedGenerator(pieces("a")), tracer=tracer, registry=registry) as door:
        with capture_logs() as lines:
            await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"traceparent": PARENT})
        scraped = await door.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert [one["trace_id"] for one in lines] == [PARENT.split("-")[1]]
    assert scraped.headers["content-type"].startswith("application/openmetrics-text")
    for name in ("time_to_first_token", "request_duration"):
        (exemplar,) = re.findall(rf"paceline_gateway_{name}_seconds_bucket.* # (\{{.*}})", scraped.text)
        assert exemplar == f'{{trace_id="{PARENT.split("-")[1]}"}}'


async def test_a_gateway_that_traces_nothing_passes_its_callers_trace_on() -> None:
    generator = ScriptedGenerator(pieces("a"))
    sent = {"traceparent": PARENT, "tracestate": "vendor=1"}
    async with scripted_door(generator) as door:
        for headers in (sent, {}, {"traceparent": PARENT, "tracestate": "x" * 10_000}, {"traceparent": "\u00e9"}):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            assert (await door.http.post(COMPLETIONS, json={"prompt": "a"}, headers=raw)).status_code == 200
    told = [{name: one[name] for name in one if name != "x-request-id"} for one in generator.headers]
    assert told == [sent, {}, {"traceparent": PARENT}, {}]


async def test_a_request_leaves_counts_and_one_line_without_text() -> None:
    registry = CollectorRegistry()
    async with scripted_door(ScriptedGenerator(pieces("private", "b")), registry=registry) as door:
        with capture_logs() as lines:
            await door.complete(prompt="private")
            await door.complete(n=0)
        scraped = (await door.http.get("/metrics")).text
    assert [(one["event"], one["status"], one["output_tokens"]) for one in lines] == [
        ("request ended", 200, 2),
        ("request ended", 400, 0),
    ]
    assert "private" not in str(lines)
    assert f'paceline_gateway_requests_total{{path="{COMPLETIONS}",status="200"}} 1.0' in scraped
    assert "paceline_gateway_requests_running 0.0" in scraped
    assert "paceline_gateway_output_tokens_total 2.0" in scraped


class Lingering(ScriptedGenerator):
    """Does not come to an end after its last piece."""

    async def generate(self, request: GenerationRequest, **asked: Any) -> AsyncGenerator[OutputPiece, None]:
        async for piece in super().generate(request, **asked):
            yield piece
        await asyncio.Event().wait()


async def test_a_client_that_goes_after_the_last_event_has_had_its_answer() -> None:
    has_read, scope = asyncio.Event(), {"type": "http", "headers": [(b"content-type", b"application/json")]}
    body = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await has_read.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body", b"").endswith(DONE):
            has_read.set()

    async with scripted_door(Lingering(pieces("a"))) as door:
        with capture_logs() as lines:
            await Endpoint(COMPLETION, door.gateway)(scope, receive, send)
    assert [one["status"] for one in lines] == [200]


async def test_a_stream_that_waits_is_not_silent() -> None:
    """Proxies ended its connection before its first token, while it waited in a queue."""
    held, sent = asyncio.Event(), list[bytes]()
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    body = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent.count(PING) == 2:
            held.set()

    async with scripted_door(ScriptedGenerator(pieces("a"), waits_for=held), silence_s=0.001) as door:
        await Endpoint(COMPLETION, door.gateway)(scope, receive, send)
    head, *pings, answer, end = sent
    assert (head, set(pings), end) == (b"", {PING}, b"")
    assert answer.startswith(b"data: {") and answer.endswith(DONE), "nothing comes behind the last event"


async def test_a_client_that_is_slow_to_take_the_last_event_gets_no_comment_behind_it() -> None:
    """With it the answer did not count as whole: the gateway's log said that the client had left."""
    sent, taken = list[bytes](), asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body") == DONE:
            await taken.wait()
        sent.append(message.get("body", b""))

    events = EventStream(send)
    async with events.pinged(0.02, lambda: True):
        sending = asyncio.create_task(events.send(DONE))
        await asyncio.sleep(0.03)
        taken.set()
        await sending
        await asyncio.sleep(0.05)
    assert sent == [b"", DONE] and events.is_whole


@dataclass
class Unreached(ScriptedGenerator):
    """Looks for a coordinator for a while, and finds none that takes the request."""

    async def generate(self, request: GenerationRequest, **asked: Any) -> AsyncGenerator[OutputPiece, None]:
        await asyncio.sleep(0.05)
        async for piece in super().generate(request, **asked):
            yield piece


async def test_a_stream_that_no_coordinator_has_taken_can_still_be_refused_by_a_status() -> None:
    async with scripted_door(Unreached(refuses=Overloaded("full")), silence_s=0.001) as door:
        assert (await door.complete(stream=True)).status_code == 429


async def test_a_client_that_reads_nothing_is_given_up_once_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept its place among those that the gateway takes for as long as its connection lasted."""
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT_S", 0.0)
    generator = ScriptedGenerator(pieces("a", "b"))
    assert await status_of_unread(generator, lambda message: message["type"] == "http.response.body") == 499
    assert generator.ended_count == 1


async def test_an_error_that_nobody_reads_ends_its_request_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT_S", 0.0)
    generator = ScriptedGenerator(pieces("a", "b")[:1], fails=CallTimedOut("late"))
    assert await status_of_unread(generator, lambda message: b'"error"' in message.get("body", b"")) == 504


async def status_of_unread(generator: ScriptedGenerator, is_unread: Callable[[Any], bool]) -> int:
    """Return the status on record of a stream whose client does not read messages of a kind, and never leaves."""
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    body = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}]

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if is_unread(message):
            await asyncio.Event().wait()

    async with scripted_door(generator, timeout_s=0.01) as door, asyncio.timeout(10):
        with capture_logs() as lines:
            await Endpoint(COMPLETION, door.gateway)(scope, receive, send)
        assert door.gateway.running.is_idle
    (status,) = (one["status"] for one in lines)
    return int(status)


async def test_the_page_fetches_nothing_from_elsewhere() -> None:
    async with scripted_door(ScriptedGenerator()) as door:
        index = await door.http.get("/")
        assert index.status_code == 200 and index.headers["content-type"].startswith("text/html")
        assert (await door.http.get("/page/page.js")).headers["content-type"].startswith("text/javascript")
        assert "default-src 'self'" in index.headers["content-security-policy"]
        for path in ("/page/none", "/page/../app.py", "/page/%2e%2e%2fapp.py"):
            assert (await door.http.get(path)).status_code == 404


async def test_the_cluster_is_told_by_the_names_of_its_types() -> None:
    async with scripted_door(ScriptedGenerator()) as door:
        told = (await door.http.get("/cluster")).json()
    assert told["target"]["model_id"] == "target"
    assert {"draft", "batch_size", "statistics", "targets", "live_sequence_count"} <= told.keys()
