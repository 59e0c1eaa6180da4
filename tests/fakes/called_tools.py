"""Tools for a model to call, a chat template that shows their names, and what says whether a call fits its tool."""

import json
from collections.abc import Mapping
from typing import Any

TEMPLATE = "{{ messages[0].content }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PARAMETERS = {"add": ADD, "now": NOW}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in PARAMETERS.items()]
NAMED = {"type": "function", "function": {"name": "add"}}


def is_of_a_tool(call: Mapping[str, Any]) -> bool:
    """Return whether a call of an answer names a tool, with arguments that its parameters allow."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "add":
        return arguments.keys() == {"a", "b"} and arguments["a"] in range(10) and arguments["b"] in ("x", "y")
    return bool(name == "now" and arguments == {})
