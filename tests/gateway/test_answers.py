"""The forms of answers: what OpenAI's clients find where, streamed or not."""

import json
import threading
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from paceline.gateway.answer import LONG_TOKENS
from paceline.gateway.choices import ChatChoice, CompletionChoice
from paceline.types import (
    DraftSource,
    FinishReason,
    GenerationFinish,
    HopTime,
    OutputPiece,
    RoundSummary,
    SourceUsage,
    TokenLogprobs,
    Usage,
)
from tests.fakes.scripted_generator import ScriptedGenerator, pieces, scripted_door, token

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]
Json = Any


def events(response: httpx2.Response) -> list[Json]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_is_answered_by_one_message() -> None:
    async with scripted_door(ScriptedGenerator(pieces("Hel", "lo"))) as door:
        answer = (await door.chat(model="target")).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "target")
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert {name: answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")} == {
        "prompt": 3,
        "completion": 2,
        "total": 5,
    }


async def test_a_streamed_chat_has_the_role_first_and_the_reason_last() -> None:
    async with scripted_door(ScriptedGenerator(pieces("Hel", "lo"))) as door:
        chunks = events(await door.chat(stream=True))
    assert [one["choices"][0]["delta"] for one in chunks] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
    ]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None, "stop"]
    assert {(one["id"], one["object"]) for one in chunks} == {(chunks[0]["id"], "chat.completion.chunk")}
    assert "usage" not in chunks[0] and "paceline" not in chunks[0]
    assert chunks[-1]["paceline"]["request_id"] == "r1"


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    async with scripted_door(ScriptedGenerator(pieces("Hel", "lo"))) as door:
        *chunks, last = events(await door.complete(stream=True, stream_options={"include_usage": True}))
    assert [one["usage"] for one in chunks] == [None, None]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5
    assert last["paceline"]["request_id"] == "r1"
    assert not [one for one in chunks if "paceline" in one]


async def test_each_chunk_tells_the_usage_up_to_it_when_asked_for() -> None:
    """vLLM's load generators ask for it; it was null."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    async with scripted_door(ScriptedGenerator(pieces("Hel", "lo"))) as door:
        chunks = events(await door.chat(stream=True, stream_options=asked))
        alone = events(await door.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in chunks] == [
        (3, 1),
        (3, 2),
        (3, 2),
    ]
    assert not [one for one in alone if "usage" in one]


async def test_a_token_without_text_makes_no_chunk() -> None:
    async with scripted_door(ScriptedGenerator(pieces("a", "", "b"))) as door:
        assert len(events(await door.complete(stream=True))) == 2
        assert len(events(await door.complete(stream=True, return_token_ids=True))) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_told_as_such(stream: bool) -> None:
    async with scripted_door(ScriptedGenerator(pieces("So: ", *CALL, CALL))) as door:
        response = await door.chat(tools=TOOLS, stream=stream)
    if stream:
        chunks = events(response)
        said = [one["choices"][0]["delta"] for one in chunks]
        calls = [call for one in said for call in one.get("tool_calls", [])]
        assert [one["index"] for one in calls] == [0, 1]
        content = "".join(one.get("content", "") for one in said)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        calls, content, reason = choice["message"]["tool_calls"], choice["message"]["content"], choice["finish_reason"]
    assert [(one["type"], one["function"]) for one in calls] == [
        ("function", {"name": "add", "arguments": '{"a": 1}'}),
    ] * 2
    assert (content, reason) == ("So: ", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_of_calls_that_are_not_parallel_only_the_first_is_told(stream: bool) -> None:
    """Calls that are not forced came all, and clients that had asked for one at most lost the others' answers."""
    async with scripted_door(ScriptedGenerator(pieces("So: ", CALL, CALL, "\n", CALL))) as door:
        response = await door.chat(tools=TOOLS, stream=stream, parallel_tool_calls=False)
    choices = [one["choices"][0] for one in (events(response) if stream else [response.json()])]
    said = [one["delta" if stream else "message"] for one in choices]
    assert len([call for one in said for call in one.get("tool_calls", [])]) == 1
    assert "".join(one.get("content") or "" for one in said) == "So: "
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_without_tools_a_call_is_text() -> None:
    async with scripted_door(ScriptedGenerator(pieces(CALL))) as door:
        for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            choice = (await door.chat(**asked)).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_an_output_that_was_cut_short_says_length_even_with_a_call() -> None:
    async with scripted_door(ScriptedGenerator(pieces(CALL, "x", reason=FinishReason.LENGTH))) as door:
        assert (await door.chat(tools=TOOLS)).json()["choices"][0]["finish_reason"] == "length"


SCORED = token(
    "é",
    logprobs=TokenLogprobs(-0.5, ((7, -0.5), (8, float("-inf")))),
    token_bytes="é".encode(),
    top_token_bytes=("é".encode(), b"\xc3"),
)
UNSCORED = token("Hi", token_bytes=b"Hi")
ONE_SCORED = OutputPiece((SCORED,), GenerationFinish(FinishReason.LENGTH, Usage(1, 1)))


async def test_chats_have_log_probabilities_with_bytes() -> None:
    async with scripted_door(ScriptedGenerator([ONE_SCORED])) as door:
        found = (await door.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    named = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert found == [{**named, "top_logprobs": [named, {"token": "�", "logprob": -9999.0, "bytes": [195]}]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_stands_before_the_output_with_its_log_probabilities(stream: bool) -> None:
    echoed = OutputPiece((), prompt_tokens=(UNSCORED, SCORED))
    async with scripted_door(ScriptedGenerator([echoed, ONE_SCORED])) as door:
        response = await door.complete(echo=True, logprobs=1, max_tokens=1, stream=stream)
    choices = [one["choices"][0] for one in (events(response) if stream else [response.json()])]
    assert "".join(one["text"] for one in choices) == "Hiéé"
    lists: dict[str, list[Json]] = {}
    for one in choices:
        for name, values in one["logprobs"].items():
            lists[name] = lists.get(name, []) + values
    assert lists["tokens"] == ["Hi", "é", "é"]
    assert lists["text_offset"] == [0, 2, 3]
    assert lists["token_logprobs"] == [None, -0.5, -0.5]
    assert lists["top_logprobs"] == [None, {"é": -0.5, "bytes:\\xc3": -9999.0}, {"é": -0.5, "bytes:\\xc3": -9999.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_long_echoed_prompts_are_written_beside_the_event_loop(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waited while a prompt with its log-probabilities was written once for each output."""
    threads: set[threading.Thread] = set()

    write = CompletionChoice.write

    def noted(self: CompletionChoice, *written: Any) -> Json | None:
        if written[2:] and written[2]:
            threads.add(threading.current_thread())
        return write(self, *written)

    monkeypatch.setattr(CompletionChoice, "write", noted)
    echoed = OutputPiece((), prompt_tokens=(UNSCORED, *[SCORED] * LONG_TOKENS))
    async with scripted_door(ScriptedGenerator([echoed, ONE_SCORED])) as door:
        response = await door.complete(prompt=["x", "y", "z"], echo=True, logprobs=1, max_tokens=1, stream=stream)
    answers = events(response) if stream else [response.json()]
    assert response.text.count("[DONE]") == stream
    texts, places = ["", "", ""], [0, 0, 0]
    for choice in (one for answer in answers for one in answer["choices"]):
        texts[choice["index"]] += choice["text"]
        places[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert texts == ["Hi" + "é" * (LONG_TOKENS + 1)] * 3
    assert places == [LONG_TOKENS + 2] * 3
    assert threads and threading.current_thread() not in threads


LIKELIEST = tuple(f"{'likely':>16}{index:02}".encode() for index in range(20))
RICH = token(
    LIKELIEST[0].decode(),
    logprobs=TokenLogprobs(-1 / 3, tuple((index, -1 / 3 - index) for index in range(20))),
    token_bytes=LIKELIEST[0],
    top_token_bytes=LIKELIEST,
)
LONGEST_LINE = 128 << 10
"""More than that aiohttp does not read of a line."""


async def test_no_line_of_a_stream_is_longer_than_clients_read() -> None:
    """A prompt that was sent back was one line of 11 MB, and what a slow reader had left one of 2.8 MB."""
    finish = GenerationFinish(FinishReason.LENGTH, Usage(1, 1000))
    echoed, rest = OutputPiece((), prompt_tokens=(RICH,) * 1000), OutputPiece((RICH,) * 1000, finish)
    async with scripted_door(ScriptedGenerator([echoed, rest])) as door:
        completion = await door.complete(echo=True, logprobs=20, stream=True)
        chat = await door.chat(logprobs=True, top_logprobs=20, stream=True)
    assert max(map(len, (completion.text + chat.text).splitlines())) < LONGEST_LINE
    choices = [one["choices"][0] for one in events(completion)]
    assert "".join(one["text"] for one in choices) == RICH.text * 2000
    assert [place for one in choices for place in one["logprobs"]["text_offset"]] == [*range(0, 2000 * 18, 18)]
    contents = [one["choices"][0]["logprobs"]["content"] for one in events(chat)]
    assert sum(map(len, contents)) == 1000
    for chunks in (events(completion), events(chat)):
        assert [one["choices"][0]["finish_reason"] for one in chunks[-2:]] == [None, "length"]


async def test_long_outputs_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody waited while many tokens with their log-probabilities were written as one answer."""
    threads: set[threading.Thread] = set()
    whole = ChatChoice.whole

    def noted(self: ChatChoice, *written: Any) -> Json:
        threads.add(threading.current_thread())
        return whole(self, *written)

    monkeypatch.setattr(ChatChoice, "whole", noted)
    long = OutputPiece((SCORED,) * LONG_TOKENS, GenerationFinish(FinishReason.LENGTH, Usage(1, LONG_TOKENS)))
    async with scripted_door(ScriptedGenerator([long])) as door:
        answer = (await door.chat(n=2, logprobs=True, top_logprobs=2)).json()
    assert [len(one["logprobs"]["content"]) for one in answer["choices"]] == [LONG_TOKENS] * 2
    assert threads and threading.current_thread() not in threads


async def test_the_prompt_alone_is_no_output() -> None:
    echoed = OutputPiece((), prompt_tokens=(UNSCORED, SCORED))
    async with scripted_door(ScriptedGenerator([echoed, ONE_SCORED])) as door:
        answer = (await door.complete(echo=True, logprobs=1, max_tokens=0)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("Hié", "length", 2)
    assert answer["usage"]["completion_tokens"] == 0


USAGE = Usage(
    prompt_count=3,
    output_count=2,
    drafted_count=9,
    accepted_count=4,
    round_count=3,
    accepted_counts_by_position=(2, 1),
    queued_s=0.5,
    sources=(SourceUsage(DraftSource.DRAFT, "small", 4, 1), SourceUsage(DraftSource.PREDICTION, "", 5, 3)),
    cached_prompt_count=2,
)


async def test_usage_tells_of_the_cache_and_the_prediction_and_adds_up_outputs() -> None:
    piece = OutputPiece((token("a"), token("b")), GenerationFinish(FinishReason.LENGTH, USAGE))
    async with scripted_door(ScriptedGenerator([piece])) as door:
        answer = (await door.complete(prompt=["x", "y"], n=2, seed=5)).json()
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 8, 14)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 8}
    assert answer["paceline"] == {
        "request_id": "r1",
        "trace_id": None,
        "seed": 5,
        "model_digest": "digest",
        "rounds": 12,
        "drafted": 36,
        "accepted": 16,
        "accepted_by_position": [8, 4],
        "queued_s": 0.5,
        "sources": [
            {"source": "draft", "model": "small", "drafted": 16, "accepted": 4},
            {"source": "prediction", "model": "", "drafted": 20, "accepted": 12},
        ],
    }


async def test_each_chunk_tells_of_its_round_when_asked_for() -> None:
    verify = HopTime(0.1, 0.2, 0.3)
    told = RoundSummary(2, 5, 1, DraftSource.SUFFIX, None, verify, 0.7, 0.1)
    drafted = replace(token("a"), accepted=True, source=DraftSource.SUFFIX)
    piece = OutputPiece((drafted, token("b", 8)), GenerationFinish(FinishReason.LENGTH, USAGE), round=told)
    generator = ScriptedGenerator([piece])
    async with scripted_door(generator) as door:
        (chunk,) = events(await door.complete(stream=True, paceline={"tell": True}))
    assert generator.asked[0].tell_rounds
    assert chunk["paceline"]["tokens"] == [
        {"id": 7, "text": "a", "source": "suffix", "accepted": True},
        {"id": 8, "text": "b", "source": None, "accepted": False},
    ]
    assert chunk["paceline"]["round"] == {
        "group_size": 2,
        "drafted": 5,
        "accepted": 1,
        "source": "suffix",
        "propose": None,
        "verify": {"wire_s": 0.1, "queued_s": 0.2, "executed_s": 0.3},
        "round_s": 0.7,
        "waited_s": 0.1,
    }
    assert chunk["paceline"]["rounds"] == 3
