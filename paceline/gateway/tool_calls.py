"""Calls of tools in outputs: the two forms that models write them in, how they are found, and formats that have them.

Hermes' form is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` amid text; that of Llama 3 is an output that
is nothing but `{"name": ..., "parameters": {...}}`.
"""

import json
import re
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from paceline.format_work.schemas import MAPS, VALUES
from paceline.gateway.bodies import Json
from paceline.types import ResponseFormat

ToolFormat = Literal["hermes", "llama3-json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_TAGS = re.compile(f"({OPEN}|{CLOSE})")
_END = ""
"""The part of an output that is its end."""
_MARKS = re.compile(r'"|\\.?|[\x00-\x1f]', re.DOTALL)
"""What tells where the strings of JSON begin and end; no control character stands in one."""
AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""White space of forced calls: as templates show calls, by Jinja's `tojson`. Free white space has no end."""


@dataclass(frozen=True)
class FoundCall:
    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True)
class Found:
    """What a stretch of an output turned out to be."""

    text: str = ""
    calls: tuple[FoundCall, ...] = ()


class CallFinder(Protocol):
    """Parts an output into text and calls, while it comes."""

    def feed(self, text: str) -> Found: ...

    def finish(self) -> Found:
        """Return what was held back, at the end of the output."""
        ...


class Place(Enum):
    """Where in JSON a text ends."""

    BETWEEN = "between strings"
    STRING = "in a string"
    ESCAPE = "behind a backslash in a string"
    NOWHERE = "it is no JSON"


def place_after(place: Place, text: str) -> Place:
    """Return where a text ends that begins at a place. It is only as strict as finding the ends of strings needs."""
    in_string = place is not Place.BETWEEN
    for mark in _MARKS.findall(text, 1 if place is Place.ESCAPE else 0):
        is_escape = mark.startswith("\\")
        if mark == '"':
            in_string = not in_string
        elif is_escape is not in_string:  # escapes stand in strings, and line ends between them
            return Place.NOWHERE
        elif mark == "\\":
            return Place.ESCAPE
    return Place.STRING if in_string else Place.BETWEEN


class _Content:
    """What stands behind an opening tag, as far as it may be a call."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._place = Place.BETWEEN

    def takes(self, part: str) -> bool:
        """Return whether a part was taken. The end of the output is not, nor what JSON does not go on with."""
        if part == _END or (part in (OPEN, CLOSE) and self._place is Place.BETWEEN):
            return False
        place = place_after(self._place, part)
        if place is Place.NOWHERE:
            return False
        self._place = place
        self.parts.append(part)
        return True


class HermesFinder:
    """Finds calls between tags. What is between them and is no call is text.

    A tag in a string of a call is part of that string. What follows an opening tag that begins no call is read again,
    and the time is linear all the same: a reading passes over an opening tag only in a string, so where another begins
    at that tag, one has strings where the other has none. A third that began there would have to differ from both.
    """

    def __init__(self) -> None:
        self._begun_tag = ""
        """Last characters, where they may be the beginning of a tag."""
        self._content: _Content | None = None
        """None outside of tags."""
        self._spaces: list[str] = []
        """White space behind a call, which is text if text follows."""
        self._is_behind_call = False
        """Whether nothing but white space came since the last call."""

    def feed(self, text: str) -> Found:
        text = self._begun_tag + text
        end = _whole_end(text)
        self._begun_tag = text[end:]
        return self._read(filter(None, _TAGS.split(text[:end])))

    def finish(self) -> Found:
        return self._read([*filter(None, [self._begun_tag]), _END])

    def _read(self, parts: Iterable[str]) -> Found:
        """Return what parts of the output are: tags, and texts without any."""
        texts: list[str] = []
        calls: list[FoundCall] = []
        ahead = deque(parts)
        while ahead:
            part = ahead.popleft()
            if self._content is None:
                if part == OPEN:
                    self._content = _Content()
                else:
                    texts.append(self._outside(part))
            elif not self._content.takes(part):
                content, self._content = self._content.parts, None
                # The closing tag is missing where it was the end of the output.
                call = read_call("".join(content), "arguments") if part in (CLOSE, _END) else None
                if call:
                    calls.append(call)
                    self._spaces.clear()
                    self._is_behind_call = True
                else:
                    texts.append(self._outside(OPEN))
                    ahead.extendleft(reversed([*content, part]))
        return Found("".join(texts), tuple(calls))

    def _outside(self, text: str) -> str:
        """Return text outside of tags, without the white space that stands between calls.

        White space that text follows is no such, so it waits for what follows.
        """
        if self._is_behind_call and not text.strip():
            self._spaces.append(text)
            return ""
        self._is_behind_call = False
        text = "".join([*self._spaces, text])
        self._spaces.clear()
        return text


class LlamaFinder:
    """Finds calls in an output that begins as JSON, of which nothing is known before its end.

    Any answer in JSON may have a name, so an object is a call only if that is the name of a tool.
    """

    def __init__(self, tool_names: Collection[str]) -> None:
        self._tool_names = tool_names
        self._held: list[str] = []
        self._begin = ""
        """The first characters that are no white space, as far as they were needed."""
        self._is_text: bool | None = None
        """None: the beginning does not tell yet."""

    def feed(self, text: str) -> Found:
        if self._is_text:
            return Found(text)
        self._held.append(text)
        if self._is_text is None:
            self._begin += text if self._begin else text.lstrip()
            self._is_text = self._told_by_begin()
        return Found(self._taken()) if self._is_text else Found()

    def finish(self) -> Found:
        held = self._taken()
        parts = _objects(held.strip().removeprefix(PYTHON_TAG))
        calls = tuple(filter(None, (read_call(part, "parameters") for part in parts)))
        are_calls = calls and len(calls) == len(parts) and all(one.name in self._tool_names for one in calls)
        return Found(calls=calls) if are_calls else Found(held)

    def _told_by_begin(self) -> bool | None:
        if self._begin.startswith(("{", PYTHON_TAG)):
            return False
        return None if PYTHON_TAG.startswith(self._begin) else True

    def _taken(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held


def _objects(text: str) -> list[str]:
    """Return the JSON objects of a text that has nothing else but white space and semicolons; [] for any other."""
    found, place, decoder = [], 0, json.JSONDecoder()
    while place < len(text):
        if text[place] in " \t\r\n;":
            place += 1
            continue
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        found.append(text[place:end])
        place = end
    return found


def _whole_end(text: str) -> int:
    """Return where the beginning of a tag that is not whole begins, or else the end of the text."""
    place = text.rfind("<")
    last = text[place:]
    is_begun = place >= 0 and last not in (OPEN, CLOSE) and (OPEN.startswith(last) or CLOSE.startswith(last))
    return place if is_begun else len(text)


def read_call(text: str, arguments_key: str) -> FoundCall | None:
    """Read a call; None for what is none."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        name, arguments = value["name"], value.get(arguments_key, {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        # A number such as 1e999 is read as one that JSON cannot hold.
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()  # half of a surrogate pair, which JSON may name, is no text
        return FoundCall(f"call_{secrets.token_hex(12)}", name, written)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def call_finder(form: ToolFormat, tool_names: Collection[str]) -> CallFinder:
    return HermesFinder() if form == "hermes" else LlamaFinder(tool_names)


def forced_calls(form: ToolFormat, tools: Sequence[Json], *, several: bool) -> ResponseFormat:
    """Return the format of an output that is a call of one of the tools; with `several`, one call or more."""
    if form == "llama3-json":
        return ResponseFormat(json_schema=_dumps(_any_call(tools, "parameters")))
    return ResponseFormat(grammar=f"start: calls\n{_hermes_calls(tools, several=several)}")


def answer_or_calls(form: ToolFormat, tool_names: Collection[str], schema: str, *, several: bool) -> ResponseFormat:
    """Return the format of an output that follows a JSON Schema or else is calls, which may have any arguments.

    As where the model calls freely, schemas of tools hold nothing up: some could not be followed.
    """
    tools = [{"function": {"name": name, "parameters": {}}} for name in sorted(tool_names)]
    if form == "llama3-json":
        calls = f"calls: {_json_rule(_dumps(_any_call(tools, 'parameters')))}"
    else:
        calls = _hermes_calls(tools, several=several)
    return ResponseFormat(grammar=f"start: answer | calls\n{calls}\nanswer: {_json_rule(schema)}")


def _hermes_calls(tools: Sequence[Json], *, several: bool) -> str:
    """Return the rules of a grammar in which `calls` is calls of any of the tools."""
    more = r' ("\n" call)*' if several else ""
    call = rf'call: "{OPEN}\n" one_call "\n{CLOSE}"'
    return f"calls: call{more}\n{call}\none_call: {_json_rule(_dumps(_any_call(tools, 'arguments')))}"


def _json_rule(schema: str) -> str:
    """Return what a grammar has for a schema, whose own texts are not to be taken for words of the grammar."""
    return "%json " + schema.replace("%json", r"\u0025json")


def _any_call(tools: Sequence[Json], arguments_key: str) -> Json:
    """Return the JSON Schema of a call of any of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments_key: _moved(_parameters(tool), f"/anyOf/{index}/properties/{arguments_key}"),
            },
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"anyOf": calls, "x-guidance": AS_TEMPLATES_WRITE}


def _parameters(tool: Json) -> Json:
    """Return the schema of a tool's arguments, which are an object whatever it says; without any, it takes none.

    It loses its own `$id`: references are then from the root of the whole.
    """
    given = tool["function"].get("parameters")
    if given is None:
        return {"type": "object", "additionalProperties": False}
    return {key: value for key, value in given.items() if key != "$id"} | {"type": "object"}


def _moved(schema: Any, place: str, *, is_map: bool = False) -> Any:
    """Return a schema, or with `is_map` those of a map, to stand elsewhere in another: references are from the root."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: value if key in VALUES and not is_map else _moved(value, place, is_map=key in MAPS and not is_map)
        for key, value in schema.items()
    }
    reference = None if is_map else schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#{place}{reference[1:]}"
    return moved


def _dumps(schema: Json) -> str:
    return json.dumps(schema, ensure_ascii=False)
