"""Whether calls of tools are read from outputs in both forms, and are those of plain decoding.

The built-in target was never taught to call, so a grammar makes it: the gateway's own for a call that is forced, and
for a free one a grammar of words and a call that the request brings.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.door.http import HttpClient
from benchmarks.door.side_by_side import drafted_and_plain
from paceline.builtin import __file__ as builtin_file
from paceline.gateway.tool_calls import ToolFormat
from tests.fakes.called_tools import NAMED, NOW, TEMPLATE, TOOLS, is_of_a_tool

MAX_NEW_TOKENS = 120
FORMS: tuple[ToolFormat, ...] = ("hermes", "llama3-json")
NO_SPACE = {"whitespace_flexible": False}
WORDS = "/[a-z ]{0,20}/"


@contextmanager
def target_with_template() -> Iterator[str]:
    """Yield the folder of the built-in target with the tests' chat template in place of its own."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in (Path(builtin_file).parent / "target").iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        yield name


async def called_counts(http: HttpClient, form: ToolFormat, count: int, *, is_forced: bool) -> tuple[int, int]:
    """Ask for a call so many times; return how many came as calls of the tools, and how many equal plain decoding."""
    asked = [_forced(seed) if is_forced else _free(form) for seed in range(count)]
    bodies = [_body(seed) | one for seed, one in enumerate(asked)]
    pairs = await drafted_and_plain(http, bodies, "/v1/chat/completions")
    outputs = [one.drafted for one in pairs]
    called = [
        one.finish_reason == "tool_calls" and len(one.tool_calls) == 1 and all(map(is_of_a_tool, one.tool_calls))
        for one in outputs
    ]
    return sum(called), sum(one.is_equal for one in pairs)


def _body(seed: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"What is {seed} and {seed % 7}?"}],
        "tools": TOOLS,
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": 1,
        "seed": seed,
    }


def _forced(seed: int) -> dict[str, Any]:
    return {"tool_choice": NAMED if seed % 2 else "required", "parallel_tool_calls": False}


def _free(form: ToolFormat) -> dict[str, Any]:
    if form == "llama3-json":
        schema = {"name": "call", "schema": _call("parameters")}
        return {"tool_choice": "auto", "response_format": {"type": "json_schema", "json_schema": schema}}
    call = r'"<tool_call>\n" call "\n</tool_call>"'
    grammar = f"start: WORDS {call}\nWORDS: {WORDS}\ncall: %json {json.dumps(_call('arguments'))}"
    return {"tool_choice": "auto", "structured_outputs": {"grammar": grammar}}


def _call(arguments_key: str) -> dict[str, Any]:
    """Return the JSON Schema of a call of either tool, written out by hand."""
    digits = {"type": "integer", "minimum": 0, "maximum": 9}
    add = {"type": "object", "properties": {"a": digits, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments_key: parameters | {"additionalProperties": False}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for name, parameters in (("add", add), ("now", NOW))
    ]
    return {"anyOf": calls, "x-guidance": NO_SPACE}
