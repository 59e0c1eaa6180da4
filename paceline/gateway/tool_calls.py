"""Calls of tools in outputs: the two forms that models write them in, how they are found, and how they are forced.

Hermes' form is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` amid text; that of Llama 3 is an output that
is nothing but `{"name": ..., "parameters": {...}}`.
"""

import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.types import ResponseFormat

ToolFormat = Literal["hermes", "llama3-json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
Json = dict[str, Any]
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


class HermesFinder:
    """Finds calls between tags. What is between them and is no call is text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._found_any = False
        self._has_begun = False
        """Whether some of the text since the last tag was given."""

    def feed(self, text: str) -> Found:
        self._held += text
        texts: list[str] = []
        calls: list[FoundCall] = []
        while True:
            before, tag, after = self._held.partition(CLOSE if self._is_inside else OPEN)
            if not tag:
                break
            self._held = after
            if self._is_inside:
                found = self._read(before, tag)
                texts.append(found.text)
                calls += found.calls
            else:
                texts.append(self._between(before))
            self._is_inside = not self._is_inside
            self._has_begun = False
        if not self._is_inside:
            given = self._between(self._held[: len(self._held) - _begun(self._held, OPEN)])
            texts.append(given)
            self._has_begun = self._has_begun or bool(given)
            self._held = self._held[len(given) :]
        return Found("".join(texts), tuple(calls))

    def finish(self) -> Found:
        held, self._held = self._held, ""
        # The closing tag is missing where it was the end of the output.
        return self._read(held, "") if self._is_inside else Found(self._between(held))

    def _read(self, content: str, closed_by: str) -> Found:
        call = read_call(content, "arguments")
        self._found_any = self._found_any or call is not None
        return Found(calls=(call,)) if call else Found(f"{OPEN}{content}{closed_by}")

    def _between(self, text: str) -> str:
        """Return text outside of tags, without the white space that stands between calls.

        White space that text follows is no such, so it waits for what follows.
        """
        return "" if self._found_any and not self._has_begun and not text.strip() else text


class LlamaFinder:
    """Finds calls in an output that begins as JSON, of which nothing is known before its end.

    Any answer in JSON may have a name, so an object is a call only if that is the name of a tool.
    """

    def __init__(self, tool_names: Collection[str]) -> None:
        self._tool_names = tool_names
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> Found:
        if self._is_text:
            return Found(text)
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{") or PYTHON_TAG.startswith(begin[: len(PYTHON_TAG)]):
            return Found()
        self._is_text, held, self._held = True, self._held, ""
        return Found(held)

    def finish(self) -> Found:
        parts = _objects(self._held.strip().removeprefix(PYTHON_TAG))
        calls = tuple(filter(None, (read_call(part, "parameters") for part in parts)))
        are_calls = calls and len(calls) == len(parts) and all(one.name in self._tool_names for one in calls)
        return Found(calls=calls) if are_calls else Found(self._held)


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


def _begun(text: str, tag: str) -> int:
    """Return how many last characters of the text may be the beginning of the tag."""
    return next((count for count in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-count:])), 0)


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
    more = r' ("\n" call)*' if several else ""
    call = rf'call: "{OPEN}\n" one_call "\n{CLOSE}"'
    # A schema's own texts are not to be taken for words of the grammar.
    schema = _dumps(_any_call(tools, "arguments")).replace("%json", r"\u0025json")
    return ResponseFormat(grammar=f"start: call{more}\n{call}\none_call: %json {schema}")


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
    """Return the schema of a tool's arguments, which are an object whatever it says.

    It loses its own `$id`: references are then from the root of the whole.
    """
    given = tool["function"].get("parameters") or {}
    return {key: value for key, value in given.items() if key != "$id"} | {"type": "object"}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that stands elsewhere in another: its references are from the root."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = f"#{place}{reference[1:]}"
    return moved


def _dumps(schema: Json) -> str:
    return json.dumps(schema, ensure_ascii=False)
