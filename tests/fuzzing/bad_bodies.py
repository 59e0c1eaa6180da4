"""Bodies of requests to the gateway, each with a defect: drawn as the JSON, or as the bytes that are none."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
Values = st.SearchStrategy[Any]
Bodies = st.SearchStrategy[tuple[str, bytes]]
"""Paths with bodies."""
Fields = dict[str, tuple[str, ...]]
"""Kinds of JSON by field."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: Mapping[str, Any] = {"role": "user", "content": "hi"}
GOOD: Mapping[str, Json] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [HI], "max_tokens": 2},
}
LARGEST = (1 << 31) - 1
_PATHS = st.sampled_from(sorted(GOOD))

VALUES: Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
_KINDS: Mapping[str, Values] = {
    "flag": st.booleans(),
    "integer": st.integers(-5, 5),
    "fraction": st.sampled_from((0.5, 1.5, -0.5)),
    "text": st.text(max_size=8),
    "list": st.lists(VALUES, min_size=1, max_size=3),
    "object": st.dictionaries(st.text(max_size=8), VALUES, min_size=1, max_size=3),
}
_NUMBER = ("integer", "fraction")
_FIELDS: Fields = {
    **dict.fromkeys(("stream", "ignore_eos", "return_token_ids"), ("flag",)),
    **dict.fromkeys(("n", "seed", "max_tokens", "top_k", "min_tokens"), ("integer",)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(("model", "guided_regex"), ("text",)),
    **dict.fromkeys(("logit_bias", "stream_options", "response_format", "prediction"), ("object",)),
    **dict.fromkeys(("structured_outputs", "paceline"), ("object",)),
    "stop": ("text", "list"),
    "stop_token_ids": ("list",),
}
"""Kinds of JSON that a field of both paths takes, beside null."""
_OWN_FIELDS: Mapping[str, Fields] = {
    COMPLETIONS: _FIELDS | {"prompt": ("text", "list"), "logprobs": ("integer",), "echo": ("flag",)},
    CHAT: _FIELDS
    | {
        **dict.fromkeys(("messages", "tools"), ("list",)),
        **dict.fromkeys(("max_completion_tokens", "top_logprobs"), ("integer",)),
        **dict.fromkeys(("logprobs", "parallel_tool_calls"), ("flag",)),
        "tool_choice": ("object",),
        "chat_template_kwargs": ("object",),
    },
}
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "n": (1, 128),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (1, LARGEST),
    "top_k": (-1, LARGEST),
    "min_tokens": (0, LARGEST),
}
_FLOATS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "+1", ".5", "1.", "0x10", "1_0", "9" * 5000)
_BROKEN_TEXT = [b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"\xc0\xaf", b"\x00", b"\n"]
_BROKEN_TEXT += [rb"\ud800", rb"\ude00\ud83d", rb"\x41", rb"\u12", b'"']
_SCHEMA = "json_schema"
_ENCODINGS = ("utf-16", "utf-16-be", "utf-32", "utf-8-sig")


def _each(field: str, *values: Any) -> list[Json]:
    return [{field: one} for one in values]


def _call(**asked: Any) -> Json:
    return {"type": "function", "function": asked}


_WRONG_PROMPTS: Sequence[Json] = (
    *_each("prompt", [], [-1], [LARGEST + 1], [1, "a"], ["a", 1], ["a"] * 257, [10**9], [[1], "a"], None, {}, [None]),
    *_each("prompt", [[[1]]], [True], [1.0]),
    *_each("max_tokens", 0),
    *_each("logprobs", 21),
    *_each("suffix", "x"),
    *_each("best_of", 2),
)
_WRONG_CHATS: Sequence[Json] = (
    *_each("messages", [], None, {}, [1], [[]], [None], [{}], [{"role": "user"}], [HI, HI, "x"]),
    *_each("messages", *([{**HI, **one}] for one in _each("role", "robot", "", 3, None, "USER", []))),
    *_each("messages", *([{**HI, **one}] for one in _each("content", 3, {}, [1], [{"type": "text"}], [{"type": "x"}]))),
    *_each("messages", *([{**HI, **one}] for one in _each("name", 3, [], {}))),
    *_each("messages", *([{"role": "assistant", **one}] for one in _each("tool_calls", [1], [{}], 3, [{"id": "x"}]))),
    *_each("messages", [{"role": "assistant", "tool_calls": [_call(name="f") | {"id": "x"}]}]),
    *_each("tools", [1], [{}], [_call()], [_call(name="a b")], [_call(name="")], [_call(name="f" * 65)], 3),
    *_each("tools", [_call(name=3)], [_call(name="f", parameters=3)], [{"type": "x", "function": {}}]),
    *_each("tool_choice", "maybe", {}, "required", _call(name="f"), _call(), {"type": "function"}),
    {"tools": [_call(name="f")], "tool_choice": _call(name="g")},
    {"tools": [_call(name="f", parameters={"type": "nonsense"})], "tool_choice": "required"},
    {"tools": [_call(name="f")], "tool_choice": "required", "guided_regex": "a"},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    *_each("max_completion_tokens", 0),
    *_each("functions", []),
    *_each("function_call", "auto"),
    *_each("audio", {}),
    *_each("modalities", ["audio"]),
    *_each("continue_final_message", True),
    *_each("add_generation_prompt", False),
)
_WRONG_EITHER: Sequence[Json] = (
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "yes"}},
    *_each("logit_bias", {"x": 1}, {"1": 101}, {"-1": 1}, {"1": None}, {"9" * 5000: 1}, {str(10**9): 1}),
    *_each("logit_bias", {str(one): 1 for one in range(1025)}),
    *_each("stop", [1], [None], ["x" * 2000], [["a"]], ["a"] * 17),
    *_each("stop_token_ids", [1] * 1025, [-1], [LARGEST + 1], [1.5], ["a"], [10**9]),
    *_each("paceline", {"tel": True}, {"sources": ["magic"]}, {"sources": "draft"}, {"tell": 1}),
    *_each("paceline", {"max_draft_count": -1}, {"draft_model": 3}),
    *_each("prediction", {}, {"type": "x"}, {"type": "content"}, {"type": "content", "content": 3}),
    *_each("response_format", {}, {"type": "xml"}, {"type": _SCHEMA}, {"type": 3}),
    *_each("response_format", *({"type": _SCHEMA, **one} for one in _each(_SCHEMA, 3, {}, {"name": "n"}, []))),
    *_each("structured_outputs", {"choice": ["a"]}, {"regex": 3}, {"regex": ""}, {"x": 1}),
    *_each("structured_outputs", *_each("json", "{", "[]", {"type": "nonsense"}, {"$ref": "#/none"}, 3)),
    *_each("structured_outputs", *_each("grammar", "", "start", "start: other", "no: /a/", "start: /(/")),
    *_each("guided_regex", "(", "[", "a{3,2}", "*", "a" * 70_000, r"\p{None}", "(?<=a)b", ""),
    {"guided_regex": "a", "response_format": {"type": "json_object"}},
    {"guided_regex": "a", "ignore_eos": True},
    *_each("repetition_penalty", 0, -1),
    *_each("use_beam_search", True),
    *_each("guided_json", {}),
    *_each("guided_grammar", {}),
    *_each("guided_choice", {}),
    *_each("prompt_logprobs", {}),
)
_WRONG: Mapping[str, Sequence[Json]] = {
    COMPLETIONS: (*_WRONG_PROMPTS, *_WRONG_EITHER),
    CHAT: (*_WRONG_CHATS, *_WRONG_EITHER),
}


def _encoded(path: str, **changes: Any) -> tuple[str, bytes]:
    return path, json.dumps(GOOD[path] | changes).encode()


@st.composite
def _wrong_kinds(draw: Any) -> tuple[str, bytes]:
    path = draw(_PATHS)
    field, taken = draw(st.sampled_from(sorted(_OWN_FIELDS[path].items())))
    kind = draw(st.sampled_from([one for one in _KINDS if one not in taken]))
    return _encoded(path, **{field: draw(_KINDS[kind])})


@st.composite
def _out_of_range(draw: Any) -> tuple[str, bytes]:
    field = draw(st.sampled_from([*_INTEGERS, *_FLOATS]))
    values: Values
    if field in _INTEGERS:
        least, most = _INTEGERS[field]
        values = st.integers(most + 1, 10**40) | st.integers(-(10**40), least - 1)
    else:
        low, high = _FLOATS[field]
        values = st.floats(min_value=high, exclude_min=True) | st.floats(max_value=low, exclude_max=True)
    return _encoded(draw(_PATHS), **{field: draw(values)})


@st.composite
def _no_numbers(draw: Any) -> tuple[str, bytes]:
    path = draw(_PATHS)
    field, word = draw(st.sampled_from(sorted(_FLOATS))), draw(st.sampled_from(_NO_NUMBERS))
    return path, json.dumps(GOOD[path]).encode()[:-1] + f', "{field}": {word}}}'.encode()


@st.composite
def _no_json(draw: Any) -> tuple[str, bytes]:
    path = draw(_PATHS)
    good = json.dumps(GOOD[path]).encode()
    broken = (
        st.integers(0, len(good) - 1).map(lambda length: good[:length])
        | st.sampled_from(_BROKEN_TEXT).map(lambda text: good.replace(b'"hi"', b'"a' + text + b'"'))
        | st.sampled_from(_ENCODINGS).map(lambda encoding: good.decode().encode(encoding))
        | st.sampled_from((b"}", b"x", b"{}", b"\x00", b",")).map(lambda rest: good + rest)
        | st.sampled_from((good.replace(b'"', b"'"), good[:-1] + b",}", b"// a\n" + good, good.replace(b":", b"=")))
        | st.binary(max_size=50)
    )
    return path, draw(broken)


@st.composite
def _too_deep(draw: Any) -> tuple[str, bytes]:
    path, depth = draw(_PATHS), draw(st.integers(300, 30_000))
    field = draw(st.sampled_from(("prompt", "messages", "tools", "logit_bias", "unknown")))
    opens, closes = draw(st.sampled_from((("[", "]"), ('{"a":', "}"))))
    deep = opens * depth + draw(st.sampled_from(("", "1" + closes * depth)))
    whole = deep if draw(st.booleans()) else json.dumps(GOOD[path])[:-1] + f', "{field}": {deep}}}'
    # Cut where it is larger than what is taken: what was drawn is depth.
    return path, whole.encode()[:60_000]


def _no_body(path: str, value: Any) -> tuple[str, bytes]:
    return path, json.dumps(value).encode()


def _without_prompt(fields: dict[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if name not in ("prompt", "messages")}


BAD_BODIES: Mapping[str, Bodies] = {
    "a field of the wrong kind": _wrong_kinds(),
    "a number out of its range": _out_of_range(),
    "a number that is none": _no_numbers(),
    "no JSON": _no_json(),
    "too deep": _too_deep(),
    "no object": st.builds(_no_body, _PATHS, VALUES.filter(lambda value: not isinstance(value, dict))),
    "no prompt": st.builds(_no_body, _PATHS, st.dictionaries(st.text(max_size=8), VALUES).map(_without_prompt)),
    "wrong fields": st.sampled_from([(path, one) for path in GOOD for one in _WRONG[path]]).map(
        lambda one: _encoded(one[0], **one[1])
    ),
    "an unknown model": st.builds(lambda path, name: _encoded(path, model=f"no {name}"), _PATHS, st.text(max_size=20)),
}
