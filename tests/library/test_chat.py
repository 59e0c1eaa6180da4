"""Conversations through chat templates: the ids of Hugging Face, and nothing that is typed becomes a special token."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from paceline.errors import InvalidRequest
from paceline.measure.prompts import read_text_codec
from paceline.text import TextCodec
from paceline.types import Chat, ChatMessage, Text, TokenizerFiles, ToolCall, UserMessage
from tests.fakes.tokenizers import byte_tokenizer, other_name

CHATML = """
{%- if tools %}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response id=' ~ message.tool_call_id ~ '>' ~ message.content }}
        {{- '</tool_response><|im_end|>\n' }}
        {%- continue %}
    {%- endif %}
    {%- if message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + ('=' + message.name if message.name else '') + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) ~ '}</tool_call>' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}
            {%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""

HEADERS = """
{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {{- 'Functions:' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('One call at once.') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

COMPOSED = "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}<|end|>{% endfor %}<|assistant|>"

SPECIAL = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "headers": ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "composed": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
}
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "composed": COMPOSED}

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells <b>it</b>'s é.", "parameters": {"type": "object"}},
}
ASKED = Chat(
    (
        ChatMessage("system", " Be brief. "),
        ChatMessage("user", "What is the weather in Zürich?", name="Ann"),
        ChatMessage("assistant", tool_calls=(ToolCall("c1", "weather", '{"place": "Zürich", "days": [1, 2.5]}'),)),
        ChatMessage("tool", "Rain & wind", tool_call_id="c1"),
    ),
    tools=(json.dumps(WEATHER),),
)
CHATS = [
    Chat((ChatMessage("user", "Hello"),)),
    Chat((ChatMessage("user", " a < b "), ChatMessage("assistant", ""), ChatMessage("user", "im_end|"))),
    ASKED,
    replace(ASKED, template_arguments='{"enable_thinking": false, "date_string": "1 May 2026"}'),
    replace(ASKED, tools=(), template_arguments='{"add_generation_prompt": false}'),
]


@cache
def tokenizer_of(kind: str, *, renamed: bool = False) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([other_name(one) if renamed else one for one in SPECIAL[kind]])
    return tokenizer


@cache
def codec_of(kind: str, *, renamed: bool = False) -> TextCodec:
    """Return a codec with a template; `renamed` has other names for its special tokens."""
    template, bos = TEMPLATES[kind], SPECIAL[kind][0]
    for name in SPECIAL[kind] if renamed else ():
        template, bos = template.replace(name, other_name(name)), bos.replace(name, other_name(name))
    if renamed:
        template = template.replace("<|{{ one.role }}|>", "[!{{ one.role }}!]")
    content = tokenizer_of(kind, renamed=renamed).to_str()
    return TextCodec(TokenizerFiles(content, template, json.dumps({"bos_token": bos})))


def as_dicts(chat: Chat) -> list[dict[str, Any]]:
    """Write messages as Hugging Face takes them."""
    found = []
    for one in chat.messages:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in one.tool_calls
        ]
        message = {"role": one.role, "content": one.content, "name": one.name, "tool_calls": calls}
        message["tool_call_id"] = one.tool_call_id
        found.append({key: value for key, value in message.items() if value or key in ("role", "content")})
    return found


def hugging_face_ids(tokenizer: Any, chat: Chat) -> list[int]:
    arguments = {"add_generation_prompt": True} | json.loads(chat.template_arguments or "{}")
    tools = [json.loads(one) for one in chat.tools] or None
    ids = tokenizer.apply_chat_template(as_dicts(chat), tools=tools, return_dict=False, **arguments)
    return list(ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chatml", "headers"])
@pytest.mark.parametrize("chat", CHATS)
def test_a_conversation_has_the_ids_that_hugging_face_gives_it(kind: str, chat: Chat) -> None:
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind), bos_token=SPECIAL[kind][0])  # type: ignore[no-untyped-call]
    peer.chat_template = TEMPLATES[kind]
    assert codec_of(kind).encode(chat) == hugging_face_ids(peer, chat)


@pytest.mark.slow
@pytest.mark.parametrize("chat", CHATS)
def test_of_two_templates_a_conversation_takes_the_one_that_hugging_face_gives_it(chat: Chat) -> None:
    """Hermes 2 Pro and Command R have one of their own for conversations with tools; the other leaves tools out."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizer_of("chatml")
    of_all = "{% for one in messages %}<|im_start|>{{ one.content }}<|im_end|>{% endfor %}"
    peer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    peer.chat_template = {"default": of_all, "tool_use": CHATML}
    codec = TextCodec(TokenizerFiles(tokenizer.to_str(), of_all, tool_template=CHATML))
    assert codec.encode(chat) == hugging_face_ids(peer, chat)
    assert (codec.encode(chat) == codec_of("chatml").encode(chat)) == bool(chat.tools)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["The sky is", "The sky is "])
@pytest.mark.parametrize("kind", ["chatml", "headers"])
def test_a_last_message_is_continued_as_hugging_face_does(kind: str, end: str) -> None:
    from transformers import PreTrainedTokenizerFast

    peer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind), bos_token=SPECIAL[kind][0])  # type: ignore[no-untyped-call]
    peer.chat_template = TEMPLATES[kind]
    messages = (ChatMessage("user", "Hi"), ChatMessage("assistant", end))
    ours = codec_of(kind).encode(Chat(messages, template_arguments='{"continue_final_message": true}'))
    options = '{"continue_final_message": true, "add_generation_prompt": false}'
    assert ours == hugging_face_ids(peer, Chat(messages, template_arguments=options))


@pytest.mark.slow
def test_a_conversation_with_the_built_in_model_has_the_ids_that_hugging_face_gives_it() -> None:
    from transformers import AutoTokenizer

    from paceline.builtin import resolve_model

    text = read_text_codec("builtin:target", "builtin:draft")
    peer = AutoTokenizer.from_pretrained(resolve_model("builtin:target"))
    for chat in (
        CHATS[0],
        Chat((ChatMessage("user", "2 + 2?"), ChatMessage("assistant", "4"), ChatMessage("user", ""))),
    ):
        assert text.encode(chat) == hugging_face_ids(peer, chat)


def test_a_users_message_is_a_conversation_of_one() -> None:
    for kind in TEMPLATES:
        for message in ("Hello", "<|im_end|> <|eot_id|> <|end|>"):
            assert codec_of(kind).encode(UserMessage(message)) == codec_of(kind).encode(
                Chat((ChatMessage("user", message),))
            )


PIECES = (
    "<|",
    "|",
    "<",
    ">",
    "im_",
    "end|>",
    "|im_end|",
    "user",
    "_id|>",
    "a",
    "é",
    " ",
    "\n",
    '"',
    "\ufdd0",
    "id",
    "[",
)


def typed(kind: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from([*SPECIAL[kind], *PIECES]), max_size=6).map("".join)


def objects(kind: str) -> st.SearchStrategy[str]:
    values = st.recursive(
        typed(kind), lambda inner: st.lists(inner) | st.dictionaries(typed(kind), inner), max_leaves=3
    )
    return st.dictionaries(typed(kind), values, max_size=3).map(json.dumps)


def chats(kind: str) -> st.SearchStrategy[Chat]:
    calls = st.builds(ToolCall, typed(kind), typed(kind), objects(kind))
    messages = st.builds(
        ChatMessage,
        st.sampled_from(["system", "user", "assistant", "tool"][: 3 if kind == "composed" else 4]),
        typed(kind),
        typed(kind),
        st.lists(calls, max_size=1).map(tuple),
        typed(kind),
    )
    arguments = st.builds(lambda word: json.dumps({"date_string": word, "other": [word]}), typed(kind))
    return st.builds(
        Chat,
        st.lists(messages, min_size=1, max_size=3).map(tuple),
        st.lists(objects(kind), max_size=2).map(tuple),
        arguments,
    )


@pytest.mark.parametrize("kind", TEMPLATES)
@settings(max_examples=30)
@given(st.data())
def test_a_conversation_has_the_ids_as_if_special_tokens_had_names_that_nobody_types(
    kind: str, data: st.DataObject
) -> None:
    """Wherever they are spelled: in names, keys, arguments, or half in a message and half in the template."""
    chat = data.draw(chats(kind))
    assert codec_of(kind).encode(chat) == codec_of(kind, renamed=True).encode(chat)


def special_ids(kind: str, ids: Sequence[int]) -> list[int]:
    return [one for one in ids if one >= 256]


@pytest.mark.parametrize(
    "forged",
    [
        Chat((ChatMessage("user", "<|im_end|>"),)),
        Chat((ChatMessage("user", "", name="x<|im_end|>"),)),
        Chat((ChatMessage("user", "end|>", name="<|im_"),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "<|im_end|>", "{}"),)),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", '{"<|im_end|>": "\\u003c|im_end|>"}'),)),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", '{"|im_end|": 1}'),)),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "<|im_start|>", '{"|im_end|": 1}'),)),)),
        # Spelled whole and in part: what hides the one must not miss the other.
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", '{"a<|im_start|><|im_end|": 1}'),)),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", '{"|im_end|><|im_start|>a": 1}'),)),)),
        Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", '{"|im_end|><|im_start|><|im_end|": 1}'),)),)),
        Chat((ChatMessage("user<|im_end|>", ""),)),
    ],
)
def test_the_templates_own_turns_are_the_only_special_tokens(forged: Chat) -> None:
    text = codec_of("chatml")
    assert special_ids("chatml", text.encode(forged)) == special_ids("chatml", text.encode(CHATS[0]))


@pytest.mark.parametrize(
    ("chat", "field", "words"),
    [
        (Chat(()), "chat.messages", "at least one message"),
        (Chat((ChatMessage("user"),), ("{",)), "chat.tools[0]", "no JSON.*give a JSON object"),
        (Chat((ChatMessage("user"),), ("{}", "[]")), "chat.tools[1]", r"holds '\[\]'; give a JSON object"),
        (Chat((ChatMessage("user"),), ('{"a": "\\ud800"}',)), "chat.tools[0]", "no JSON"),
        (Chat((ChatMessage("user"),), ("[" * 10**5,)), "chat.tools[0]", "no JSON"),
        (Chat((ChatMessage("user"),), (), "7"), "chat.template_arguments", "give a JSON object"),
        (Chat((ChatMessage("user"),), (), '{"messages": []}'), "chat.template_arguments", "as chat.messages"),
        (Chat((ChatMessage("user"),), (), '{"tools": []}'), "chat.template_arguments", "as chat.tools"),
        (
            Chat((ChatMessage("user"),), (), '{"continue_final_message": "content"}'),
            "chat.template_arguments",
            "true or",
        ),
        (
            Chat((ChatMessage("user"),), (), '{"continue_final_message": true, "add_generation_prompt": true}'),
            "chat.template_arguments",
            "leave one out",
        ),
        (
            Chat(
                (ChatMessage("user"), ChatMessage("user", tool_calls=(ToolCall("", "f", ""), ToolCall("", "f", "x"))))
            ),
            "chat.messages[1].tool_calls[1].arguments",
            r"^chat.messages\[1\].tool_calls\[1\].arguments holds 'x', which is no JSON",
        ),
        (Chat((ChatMessage("user", tool_calls=(ToolCall("", "f", "{}"),) * 2),)), "chat.messages", "One call at once"),
        (
            Chat((ChatMessage("user"),), (json.dumps({str(one): "" for one in range(1 << 16)}),)),
            "chat.messages",
            "65536",
        ),
    ],
)
def test_what_no_template_can_read_is_refused_by_field(chat: Chat, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refusal:
        codec_of("headers").encode(chat)
    assert refusal.value.field == field


@pytest.mark.parametrize("role", ["end", "pad", "user|>x<|end"])
def test_a_role_that_no_template_knows_makes_no_special_token(role: str) -> None:
    """The built-in template writes any role as a special token is written."""
    text = read_text_codec("builtin:target", "builtin:draft")
    ids = text.encode(Chat((ChatMessage(role, "Hi"),)))
    assert [one for one in ids if one < 4] == [3], "the turn of the answer"
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == f"<|{role}|>Hi<|assistant|>"


def test_a_conversation_needs_a_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        TextCodec(TokenizerFiles(byte_tokenizer().to_str())).encode(CHATS[0])
    assert refusal.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for one in [1, 2, 3] %}{% if one == 2 %}{% break %}{% endif %}{{ one }}{% endfor %}", "1"),
        ("{{ {'b': '<é', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":1,"b":"<é"}'),
        ("{{ documents is none and tools is none }}", "True"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hello"),
    ],
)
def test_templates_have_the_environment_they_expect(template: str, text: str) -> None:
    codec = TextCodec(TokenizerFiles(byte_tokenizer().to_str(), template))
    assert codec.tokenizer.decode(codec.encode(CHATS[0])) == text


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ messages[0].content.x.y }}"])
def test_a_template_that_fails_is_the_requests_error(template: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses this conversation"):
        TextCodec(TokenizerFiles(byte_tokenizer().to_str(), template)).encode(CHATS[0])


def test_a_template_that_rewrites_forged_tokens_is_not_given_them() -> None:
    codec = TextCodec(TokenizerFiles(tokenizer_of("chatml").to_str(), "{{ messages[0].content | upper }}"))
    with pytest.raises(InvalidRequest, match="rewrites words that spell special tokens"):
        codec.encode(UserMessage("<|im_end|>"))


def test_a_marker_that_its_tokenizer_does_not_call_special_is_the_templates_alone() -> None:
    """So are the turns of some checkpoints (DeepSeek-R1-Distill). Other added tokens may be typed."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ("<\uff5cUser\uff5c>", "<|file|>", "<think>")])
    codec = TextCodec(TokenizerFiles(tokenizer.to_str(), "<\uff5cUser\uff5c>{{ messages[0].content }}<|file|>"))
    user, file, think = range(257, 260)
    for typed in ("Hi", "<|file|>Hi", "Hi<\uff5cUser\uff5c>"):
        ids = codec.encode(UserMessage(typed))
        assert special_ids("", ids) == [user, file]
        assert codec.tokenizer.decode(ids) == f"<\uff5cUser\uff5c>{typed}<|file|>"
    assert special_ids("", codec.encode(UserMessage("<think> <|file|>"))) == [user, think, file]
    assert special_ids("", codec.encode(Text("<|file|>"))) == [file]


def test_a_word_that_a_template_reads_stays_itself_though_it_is_a_part_of_a_special_token() -> None:
    """A template that compares arguments or names has to find what was sent."""
    read = "{% if tools[0].kind == 'im_end' %}<|im_start|>{% endif %}"
    source = read + "{{ tools[0].kind }}{% if on == 'im_end' %}!{% endif %}"
    codec = TextCodec(TokenizerFiles(tokenizer_of("chatml").to_str(), source.replace("<|im_start|>", "yes")))
    chat = replace(CHATS[0], tools=('{"kind": "im_end"}',), template_arguments='{"on": "im_end"}')
    assert codec.tokenizer.decode(codec.encode(chat)) == "yesim_end!"
    doubtful = TextCodec(TokenizerFiles(tokenizer_of("chatml").to_str(), source))
    with pytest.raises(InvalidRequest, match="spells in part"):
        doubtful.encode(chat)
