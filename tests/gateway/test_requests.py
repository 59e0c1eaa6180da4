"""Every field of a body arrives in the request that a coordinator gets, or is refused with its name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.checks import MIN_TEMPERATURE, check_sampling
from paceline.gateway.apis import CHAT, COMPLETION
from paceline.gateway.errors import HttpError
from paceline.gateway.reading import parse
from paceline.types import (
    Chat,
    ChatMessage,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    ResponseFormat,
    SamplingParameters,
    Text,
    TokenIds,
    ToolCall,
)

HI = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"id": "c1", "function": {"name": "now", "arguments": "{}"}}
NOW = {"type": "function", "function": {"name": "now"}}
LARGEST_VOCABULARY = 10_000_000
"""No model has more tokens, so the likeliest is likelier than one in so many."""


def chat(**asked: Any) -> GenerationRequest:
    content = json.dumps({"messages": [HI], **asked}).encode()
    (request,) = CHAT.requests(parse(content, CHAT.body), "hermes")
    return request


def completions(**asked: Any) -> list[GenerationRequest]:
    content = json.dumps({"prompt": "hi", **asked}).encode()
    return COMPLETION.requests(parse(content, COMPLETION.body), "hermes")


def refused(**asked: Any) -> HttpError:
    with pytest.raises(HttpError) as found:
        completions(**asked) if "prompt" in asked else chat(**asked)
    assert found.value.status == 400
    return found.value


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logit_bias": {str(one): 1 for one in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"messages": [HI] * 65_537}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 65_537}]}, "messages[0].tool_calls"),
        ({"tools": [NOW] * 65_537}, "tools"),
        ({"paceline": {"sources": ["draft"] * 65_537}}, "paceline.sources"),
        ({"paceline": {"forbidden_sources": ["draft"] * 65_537}}, "paceline.forbidden_sources"),
    ],
)
def test_what_no_coordinator_takes_is_refused_before_it_is_converted(asked: dict[str, Any], param: str) -> None:
    """Conversion of a few megabytes of it held the gateway up for seconds."""
    assert refused(**asked).param == param


def test_a_list_of_too_many_entries_is_told_how_many_it_may_have() -> None:
    told = refused(tools=[NOW] * 65_537).message
    assert told == "tools has 65537 entries; give 65536 at most"


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]},
        {"tools": [1] * 1000},
        {"stop_token_ids": ["a"] * 1000},
        {"paceline": {"sources": [1] * 1000}},
        {"paceline": {"forbidden_sources": [1] * 1000}},
    ],
)
def test_a_list_of_many_wrong_entries_is_one_error(asked: dict[str, Any]) -> None:
    """An error for each of them took hundreds of times the bytes of the body, and all streams waited meanwhile."""
    with pytest.raises(ValidationError) as found:
        CHAT.body.model_validate_json(json.dumps({"messages": [HI], **asked}))
    assert found.value.error_count() == 1


@pytest.mark.parametrize("field", ["paceline", "structured_outputs"])
def test_an_object_of_many_unknown_fields_is_one_error(field: str) -> None:
    unknown = {f"a{index}": 1 for index in range(1000)}
    with pytest.raises(ValidationError) as found:
        CHAT.body.model_validate_json(json.dumps({"messages": [HI], field: unknown}))
    assert found.value.error_count() == 1


def test_an_unknown_field_is_told_which_are_known() -> None:
    """It was refused in pydantic's words, which say nothing of what to give."""
    expected = "structured_outputs.choice is not known; give any of json, regex, grammar"
    assert refused(structured_outputs={"choice": ["a"]}).message == expected
    message = refused(paceline={"tell": True, "tel": 1}).message
    assert message.startswith("paceline.tel is not known; give any of max_draft_count, sources,")
    assert message.endswith(", tell")


def test_a_long_format_does_not_go_with_many_prompts() -> None:
    """A body of eight megabytes became two gigabytes of messages."""
    long, prompts = "a" * 100_000, ["hi"] * 100
    assert refused(prompt=prompts, guided_regex=long).param == "response_format"
    assert refused(prompt=prompts, prediction={"type": "content", "content": long}).param == "prediction"
    assert len(completions(prompt=prompts, guided_regex="a" * 10_000)) == 100
    assert len(completions(prompt="hi", guided_regex=long)) == 1


def test_fields_of_sampling_arrive() -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 2,
        "logit_bias": {"5": 1, "6": -2.5},
    }
    expected = SamplingParameters(0.5, 4, 0.9, 0.1, ((5, 1.0), (6, -2.5)), 1.1, 0.2, -0.3, 2)
    assert chat(**sampling).sampling == completions(**sampling)[0].sampling == expected


def test_without_a_temperature_it_is_openais() -> None:
    assert chat().sampling == SamplingParameters(temperature=1.0)
    assert chat(top_k=-1, temperature=None).sampling == SamplingParameters(temperature=1.0)


def test_all_of_openais_range_is_taken() -> None:
    """Clients send 1e-8 for the likeliest token, and 0 for both."""
    for asked in (0.0, 1e-8, MIN_TEMPERATURE / 2, MIN_TEMPERATURE, 2.0):
        for top_p in (0.0, 0.5, 1.0):
            check_sampling(chat(temperature=asked, top_p=top_p).sampling, vocabulary_size=8)
    assert chat(temperature=1e-8).sampling.temperature == 0
    assert chat(temperature=MIN_TEMPERATURE).sampling.temperature == MIN_TEMPERATURE
    assert chat(top_p=0).sampling.top_p < 1 / LARGEST_VOCABULARY


def test_fields_of_ends_and_counts_arrive() -> None:
    asked = chat(stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=4, max_tokens=9, seed=-1)
    assert (asked.stop_strings, asked.stop_token_ids, asked.ignore_end_tokens) == (("a", "b"), (3,), True)
    assert (asked.completion_count, asked.max_new_tokens, asked.seed) == (4, 9, (1 << 64) - 1)
    assert chat(max_tokens=9, max_completion_tokens=5, stop="x").max_new_tokens == 5
    assert chat(stop="x").stop_strings == ("x",)
    assert chat().max_new_tokens is None
    assert completions()[0].max_new_tokens == 16


def test_either_name_of_the_limit_counts_in_completions_too() -> None:
    """Those that gave the newer one got 16 tokens."""
    assert completions(max_completion_tokens=90)[0].max_new_tokens == 90
    assert completions(max_tokens=9, max_completion_tokens=5)[0].max_new_tokens == 5
    content = b'{"prompt": "hi", "echo": true, "max_tokens": 0, "max_completion_tokens": 5}'
    assert not parse(content, COMPLETION.body).is_prompt_alone


def test_a_drawn_seed_is_one_that_javascript_reads() -> None:
    seeds = [chat().seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(seed is not None and seed < 1 << 53 for seed in seeds)


def test_log_probabilities_and_echo_arrive() -> None:
    assert chat().top_logprob_count is None
    assert chat(logprobs=True).top_logprob_count == 0
    assert chat(logprobs=True, top_logprobs=4).top_logprob_count == 4
    (asked,) = completions(logprobs=3, echo=True, max_tokens=0)
    assert (asked.top_logprob_count, asked.echo_prompt, asked.max_new_tokens) == (3, True, 1)


def test_our_own_options_arrive() -> None:
    ours = {"max_draft_count": 2, "sources": ["draft", "suffix"], "forbidden_sources": ["prediction"]}
    asked = chat(paceline={**ours, "in_order": True, "draft_model": "small", "tell": True})
    sources = (DraftSource.DRAFT, DraftSource.SUFFIX)
    assert asked.drafting == DraftingOptions(sources, True, (DraftSource.PREDICTION,), "small")
    assert (asked.max_draft_count, asked.tell_rounds) == (2, True)


def test_a_prediction_arrives_as_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(prediction={"type": "content", "content": parts}).predicted_output == Text("ab")


def test_conversations_arrive_with_their_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "name": "Ann",
                "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        tools=[ADD],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert asked.prompt == Chat(
        (
            ChatMessage("system", "be brief"),
            ChatMessage("user", "1 + 1", "Ann"),
            ChatMessage("assistant", tool_calls=(ToolCall("c1", "add", '{"a": 1}'),)),
            ChatMessage("tool", "2", tool_call_id="c1"),
        ),
        (json.dumps(ADD),),
        '{"enable_thinking": false}',
    )


@pytest.mark.parametrize(
    ("asked", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"reasoning_effort": "high", "enable_thinking": False, "a": 1},
        ),
    ],
)
def test_the_effort_of_reasoning_reaches_the_template(asked: dict[str, Any], variables: dict[str, Any]) -> None:
    """It was ignored, and templates that know it wrote another prompt than it asks for."""
    prompt = chat(**asked).prompt
    assert isinstance(prompt, Chat)
    assert json.loads(prompt.template_arguments or "{}") == variables


def test_what_the_template_does_is_asked_of_it() -> None:
    for asked in ({"continue_final_message": True}, {"add_generation_prompt": False}, {"documents": [{"text": "a"}]}):
        assert refused(**asked).message.endswith("is not supported; give it in chat_template_kwargs")


def test_tools_that_may_not_be_called_are_not_shown_to_the_model() -> None:
    prompt = chat(tools=[ADD], tool_choice="none").prompt
    assert isinstance(prompt, Chat)
    assert prompt.tools == ()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [Text("a")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2], [TokenIds((1, 2))]),
        ([[1, 2], [3]], [TokenIds((1, 2)), TokenIds((3,))]),
    ],
)
def test_prompts_arrive_in_each_form(prompt: Any, expected: list[Any]) -> None:
    assert [one.prompt for one in completions(prompt=prompt)] == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ResponseFormat(json_schema='{"type": "object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            ResponseFormat(json_schema='{"type": "null"}'),
        ),
        ({"guided_regex": "a+"}, ResponseFormat(regex="a+")),
        ({"structured_outputs": {"regex": "b+"}}, ResponseFormat(regex="b+")),
        ({"structured_outputs": {"grammar": "start: "}}, ResponseFormat(grammar="start: ")),
        ({"structured_outputs": {"json": {"type": "null"}}}, ResponseFormat(json_schema='{"type": "null"}')),
    ],
)
def test_formats_arrive(asked: dict[str, Any], expected: ResponseFormat | None) -> None:
    assert chat(**asked).response_format == completions(**asked)[0].response_format == expected


def test_several_formats_at_once_are_refused() -> None:
    error = refused(guided_regex="a", response_format={"type": "json_object"})
    assert "response_format, guided_regex" in error.message
    assert refused(tools=[ADD], tool_choice="required", guided_regex="a").param == "tool_choice"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2.5}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop": [1]}, "stop"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HI, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"chat_template_kwargs": {"x": float("inf")}}, "chat_template_kwargs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"paceline": {"sources": ["magic"]}}, "paceline.sources[0]"),
        ({"paceline": {"tel": True}}, "paceline.tel"),
        ({"functions": []}, "functions"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"echo": True}, "echo"),
        ({"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"cache_salt": "secret"}, "cache_salt"),
        ({"logprobs": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"priority": 1}, "priority"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"watermarking": True}, "watermarking"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"return_prompt_text": True}, "return_prompt_text"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"verbosity": "low"}, "verbosity"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= a"}, "ebnf"),
        ({"prompt": "a", "json_schema": "{}"}, "json_schema"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"no_stop_trim": True}, "no_stop_trim"),
        ({"lora_path": "a"}, "lora_path"),
        ({"input_ids": [1]}, "input_ids"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}, "messages[0].function_call"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt": "a", "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"prompt": "a", "logits_processors": ["a"]}, "logits_processors"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": True}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_wrong_field_is_named(asked: dict[str, Any], param: str) -> None:
    error = refused(**asked)
    assert error.param == param
    assert error.message.startswith(param)
    assert not error.message.removeprefix(param).startswith(" give"), "it says what is wrong before what to give"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"temperature": "hot"}, "temperature is wrong: Input should be a valid number"),
        ({"temperature": 3}, "temperature is 3: Input should be less than or equal to 2"),
        ({"messages": []}, "messages has 0 entries; give 1 at least"),
        ({"prompt": "a", "n": None, "stream": "yes"}, "stream is wrong: Input should be a valid boolean"),
    ],
)
def test_what_is_wrong_with_a_field_is_a_sentence(asked: dict[str, Any], told: str) -> None:
    assert refused(**asked).message == told


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
        ({"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "mul"}}},
            "tool_choice names a tool",
        ),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(asked: dict[str, Any], words: str) -> None:
    error = refused(**asked)
    assert error.message.startswith(words)
    assert error.param == words.partition(" ")[0]


@pytest.mark.parametrize(
    "content", [b'{"messages": "\\ud800"}', b"\xff\xfe", b'{"a": ' * 2000, b'{"n": 1' + b"0" * 5000 + b"}", b"[]", b"1"]
)
def test_what_is_no_json_or_no_body_is_refused(content: bytes) -> None:
    with pytest.raises(HttpError) as found:
        parse(content, CHAT.body)
    assert (found.value.status, found.value.param) == (400, None)
    assert found.value.message.startswith("the body is ")


def test_fields_that_change_nothing_are_taken() -> None:
    unknown = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "made_up": [1]}
    harmless = {"bad_words": [], "include_stop_str_in_output": False, "use_beam_search": False}
    harmless |= {"skip_special_tokens": True, "return_tokens_as_token_ids": False, "priority": 0, "vllm_xargs": {}}
    harmless |= {"thinking_token_budget": -1, "watermarking": False, "no_stop_trim": False, "cache_salt": None}
    alone = {"best_of": 1, "suffix": None, "add_special_tokens": True}
    assert completions(**unknown, **harmless, **alone, seed=1) == completions(seed=1)
    assert completions(n=2, best_of=2, seed=1) == completions(n=2, best_of=None, seed=1) == completions(n=2, seed=1)
    chats = {"modalities": ["text"], "add_generation_prompt": True, "parallel_tool_calls": True, "echo": False}
    chats |= {"add_special_tokens": False, "include_reasoning": True, "verbosity": "medium"}
    assert chat(**harmless, **chats, seed=1) == chat(seed=1)


def test_a_forced_call_is_a_format_of_that_tool_alone() -> None:
    named = chat(tools=[ADD, NOW], tool_choice={"type": "function", "function": {"name": "now"}}).response_format
    both = chat(tools=[ADD, NOW], tool_choice="required").response_format
    assert named and both
    assert '"now"' in named.grammar and '"add"' not in named.grammar
    assert '"now"' in both.grammar and '"add"' in both.grammar
    assert chat(tools=[ADD], tool_choice="auto").response_format is None


def test_a_format_beside_tools_that_may_be_called_is_that_or_calls() -> None:
    """No tool could be called then, and nothing said so."""
    null = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
    asked = chat(tools=[ADD, NOW], response_format=null).response_format
    assert asked and all(f'"{word}"' in asked.grammar for word in ("null", "add", "now"))
    assert '"a"' not in asked.grammar, "what a tool takes is not followed where it is not forced"
    assert chat(tools=[ADD], tool_choice="none", response_format=null).response_format == ResponseFormat(
        json_schema='{"type": "null"}'
    )
    alone = chat(tools=[ADD], tool_choice="auto", parallel_tool_calls=False, response_format={"type": "json_object"})
    assert alone.response_format and "call)*" not in alone.response_format.grammar
