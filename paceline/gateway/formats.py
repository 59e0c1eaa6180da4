"""What an output must look like: the constraints of a body as one `ResponseFormat`."""

import json
from collections.abc import Iterator
from typing import Any

from paceline.gateway.bodies import ChatBody, GenerationBody, NamedTool, ResponseFormatBody
from paceline.gateway.errors import invalid
from paceline.gateway.tool_calls import ToolFormat, answer_or_calls, forced_calls
from paceline.types import ResponseFormat

ANY_OBJECT = '{"type": "object"}'


def response_format_of(body: GenerationBody, tool_format: ToolFormat) -> ResponseFormat | None:
    """Return the format that a body asks for; None for any. Raise HttpError when it asks for several."""
    formats = [*_asked(body, tool_format), *_forced(body, tool_format)]
    if len(formats) > 1:
        fields = ", ".join(field for field, _ in formats)
        raise invalid(f"the output cannot follow several formats: {fields}; give one of them", formats[1][0])
    return formats[0][1] if formats else None


def format_field(body: GenerationBody) -> str:
    """Return the field that says which format outputs have, of a body in which one does at most."""
    given = body.structured_outputs
    fields = {
        "guided_regex": body.guided_regex is not None,
        "structured_outputs.json": given and given.json_ is not None,
        "structured_outputs.regex": given and given.regex is not None,
        "structured_outputs.grammar": given and given.grammar is not None,
        "tool_choice": isinstance(body, ChatBody) and body.forces_call,
    }
    return next((field for field, is_given in fields.items() if is_given), "response_format")


def _asked(body: GenerationBody, tool_format: ToolFormat) -> Iterator[tuple[str, ResponseFormat]]:
    if body.response_format and body.response_format.type != "text":
        schema = _schema(body.response_format)
        if isinstance(body, ChatBody) and body.calls_tools and not body.forces_call:
            several = body.parallel_tool_calls is not False
            yield "response_format", answer_or_calls(tool_format, body.tool_names, schema, several=several)
        else:
            yield "response_format", ResponseFormat(json_schema=schema)
    if body.guided_regex is not None:
        yield "guided_regex", ResponseFormat(regex=_given(body.guided_regex, "guided_regex"))
    if (given := body.structured_outputs) is None:
        return
    if given.json_ is not None:
        text = given.json_ if isinstance(given.json_, str) else as_json(given.json_, "structured_outputs.json")
        yield "structured_outputs.json", ResponseFormat(json_schema=_given(text, "structured_outputs.json"))
    if given.regex is not None:
        yield "structured_outputs.regex", ResponseFormat(regex=_given(given.regex, "structured_outputs.regex"))
    if given.grammar is not None:
        yield "structured_outputs.grammar", ResponseFormat(grammar=_given(given.grammar, "structured_outputs.grammar"))


def _schema(asked: ResponseFormatBody) -> str:
    if asked.type == "json_object":
        return ANY_OBJECT
    if not asked.json_schema or asked.json_schema.schema_ is None:
        raise invalid("response_format.json_schema has no schema; give one", "response_format.json_schema")
    return as_json(asked.json_schema.schema_, "response_format.json_schema")


def _forced(body: GenerationBody, tool_format: ToolFormat) -> Iterator[tuple[str, ResponseFormat]]:
    if not isinstance(body, ChatBody) or not body.forces_call:
        return
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        tools = [one for one in tools if one["function"]["name"] == choice.name][:1]
    several = choice == "required" and body.parallel_tool_calls is not False
    for one in tools:
        as_json(one, "tools")
    yield "tool_choice", forced_calls(tool_format, tools, several=several)


def _given(text: str, field: str) -> str:
    if not text:
        raise invalid(f"{field} is empty; leave it out", field)
    return text


def as_json(value: Any, field: str) -> str:
    """Return a value of a body as JSON. Raise HttpError for numbers that no other program would read."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise invalid(f"{field} has a number that is infinite or too long, or is too deep", field) from None
