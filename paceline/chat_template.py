"""Conversations as chat templates read them, and the templates: their environment, and what they are given.

Knows nothing of tokens. A template comes with a checkpoint, so it runs in a sandbox.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidRequest
from paceline.types import Chat, ChatMessage, ToolCall, UserMessage

MAX_STRINGS = 1 << 16
"""Strings of a conversation, those within its JSON included: each takes time of its own, however short it is."""

LATEST_TIME_S = 250_000_000_000
"""In the year 9892; a calendar ends with the year 9999, in any time zone."""
ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"})
"""Roles that templates know. Some make a special token of one, so another role is taken for a user's own words."""

Variables = dict[str, Any]
Change = Callable[[str, bool], str]
"""Changes a string of a conversation. The second argument tells that templates read it: a role, or an argument."""


@dataclass(frozen=True)
class Conversation:
    """A conversation whose JSON was read."""

    messages: Sequence[Variables]
    tools: Sequence[Variables]
    arguments: Mapping[str, Any]
    """Further variables of the template."""
    time_s: float
    """What the template takes for now, in seconds since 1970: the same however often it is rendered."""
    adds_generation_prompt: bool = True
    continues: bool = False
    """Whether the last message stays open, to be continued."""
    field: str = "chat.messages"
    """Field of the request that it came in."""

    @classmethod
    def of(cls, prompt: Chat | UserMessage, time_s: float | None = None) -> Self:
        """Read a prompt, of now unless a time is given.

        Raise InvalidRequest, naming the field, for what no template can read.
        """
        time_s = time.time() if time_s is None else time_s
        if isinstance(prompt, UserMessage):
            return cls([{"role": "user", "content": prompt.value}], (), {}, time_s, field="user_message")
        if not prompt.messages:
            raise InvalidRequest("chat.messages is empty; give it at least one message", field="chat.messages")
        arguments = _object(prompt.template_arguments or "{}", "chat.template_arguments")
        for name in ("messages", "tools"):
            if name in arguments:
                raise _refused(
                    f"sets the variable {name!r}; leave it out, and give it as chat.{name}, beside {_ARGUMENTS}",
                    _ARGUMENTS,
                )
        continues = _flag(arguments, "continue_final_message", default=False)
        adds_prompt = _flag(arguments, "add_generation_prompt", default=not continues)
        if continues and adds_prompt:
            raise _refused("sets continue_final_message and add_generation_prompt; leave one out", _ARGUMENTS)
        tools = [_object(one, f"chat.tools[{place}]") for place, one in enumerate(prompt.tools)]
        messages = [_message(one, f"chat.messages[{place}]") for place, one in enumerate(prompt.messages)]
        conversation = cls(messages, tools, arguments, time_s, adds_prompt, continues)
        if sum(1 for _ in conversation.strings()) > MAX_STRINGS:
            raise _refused(
                f"has more than {MAX_STRINGS} strings, with tools and arguments; give fewer", "chat.messages"
            )
        return conversation

    def strings(self) -> Iterator[tuple[str, bool]]:
        """Yield every string that its author wrote, and whether templates read it rather than only write it."""
        for message in self.messages:
            yield message["role"], message["role"] in ROLES
            yield from ((one, False) for one in _strings([value for key, value in message.items() if key != "role"]))
        yield from ((one, False) for one in _strings(list(self.tools)))
        yield from ((one, True) for one in _strings(list(self.arguments.values())))

    def variables(self, change: Change) -> Variables:
        """Return what a template is given, with every string changed."""
        arguments = {name: _changed(value, change, True) for name, value in self.arguments.items()}
        messages = [
            {name: _changed(value, change, name == "role" and value in ROLES) for name, value in one.items()}
            for one in self.messages
        ]
        tools = [_changed(one, change, False) for one in self.tools] or None
        own = {"messages": messages, "tools": tools, "add_generation_prompt": self.adds_generation_prompt}
        return {"documents": None, "strftime_now": self._strftime} | arguments | own

    def _strftime(self, form: str) -> str:
        return datetime.fromtimestamp(self.time_s).strftime(form)


def is_continued(prompt: Chat | UserMessage) -> bool:
    """Return whether the last message of a prompt that could be read stays open."""
    return isinstance(prompt, Chat) and _flag(
        _object(prompt.template_arguments or "{}", _ARGUMENTS), "continue_final_message", default=False
    )


def character_count(chat: Chat) -> int:
    """Return the characters of a conversation."""
    count = len(chat.template_arguments) + sum(map(len, chat.tools))
    for one in chat.messages:
        count += len(one.role) + len(one.content) + len(one.name) + len(one.tool_call_id)
        count += sum(len(call.id) + len(call.name) + len(call.arguments) for call in one.tool_calls)
    return count


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` has texts of special tokens by the names that templates know. Raise jinja2.TemplateError."""
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, conversation: Conversation, change: Change = lambda text, _: text) -> str:
        """Return the conversation's text. Raise InvalidRequest when the template refuses it."""
        end = unknown_word(secrets.token_hex(16), "") + " "
        try:
            variables = conversation.variables(change)
            if conversation.continues:
                variables["messages"][-1]["content"] += end
            rendered = self._template.render({**self._special_tokens, **variables})
        except Exception as error:  # a template can fail in any way
            raise InvalidRequest(
                f"the chat template refuses this conversation: {error}; give what the model's template takes",
                field=conversation.field,
            ) from error
        return _until(rendered, end, conversation.field) if conversation.continues else rendered


def unknown_word(secret: str, number: int | str) -> str:
    """Return a word that nobody can have written. Noncharacters at its ends keep a vocabulary's tokens out of it."""
    return f"\ufdd0{secret}{number}\ufdd0"


def _until(rendered: str, end: str, field: str) -> str:
    place = rendered.rfind(end.strip())
    if place < 0:
        raise _refused("ends with a message that the chat template leaves out; it cannot be continued", field)
    # A template that trims messages has taken the space of the end too.
    return rendered[:place] if rendered.startswith(end, place) else rendered[:place].rstrip()


def _message(message: ChatMessage, field: str) -> Variables:
    variables: Variables = {"role": message.role, "content": message.content}
    if message.name:
        variables["name"] = message.name
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        variables["tool_calls"] = [_call(one, f"{field}.tool_calls[{place}]") for place, one in calls]
    if message.tool_call_id:
        variables["tool_call_id"] = message.tool_call_id
    return variables


def _call(call: ToolCall, field: str) -> Variables:
    function = {"name": call.name, "arguments": _object(call.arguments or "{}", f"{field}.arguments")}
    return {"id": call.id, "type": "function", "function": function}


_ARGUMENTS = "chat.template_arguments"


def _flag(arguments: Variables, name: str, *, default: bool) -> bool:
    """Take a flag out of the arguments, which does not go to the template as it is."""
    value = arguments.pop(name, default)
    if not isinstance(value, bool):
        raise _refused(f"has {value!r} as {name}; give true or false", _ARGUMENTS)
    return value


def _object(text: str, field: str) -> Variables:
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a character has no place in a text
    except (ValueError, RecursionError) as error:
        raise _refused(f"holds {_shown(text)}, which is no JSON: {error}; give a JSON object", field) from error
    if not isinstance(value, dict):
        raise _refused(f"holds {_shown(text)}; give a JSON object", field)
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _refused(words: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {words}", field=field)


def _strings(values: list[Any]) -> Iterator[str]:
    """Yield the strings in JSON values, keys included. Without recursion, for values may be nested deeply."""
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value
            values += value.values()
        elif isinstance(value, list):
            values += value


def _changed(value: Any, change: Change, is_read: bool) -> Any:
    if isinstance(value, str):
        return change(value, is_read)
    if isinstance(value, Mapping):
        return {change(key, is_read): _changed(one, change, is_read) for key, one in value.items()}
    if isinstance(value, list):
        return [_changed(one, change, is_read) for one in value]
    return value


class _GenerationBlock(Extension):
    """The tag around what a model writes, which some templates have for training. Here its content is all there is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect: that of Hugging Face's `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: Any) -> NoReturn:
    raise TemplateError(str(message))
