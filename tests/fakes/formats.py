"""Random response formats of small outputs, and what says whether a text follows one."""

import json
import random
import re
from typing import Any

from paceline.types import ResponseFormat


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """Return a regex that Python reads as the library does, whose matches are short."""
    kind = rng.randrange(7) if depth else 0
    if kind < 2:
        return rng.choice(["a", "b", "[abc]", r"[0-9]", "é", r"\{", "xyz", "[^a-y]{1,2}"])
    parts = [random_regex(rng, depth - 1) for _ in range(2)]
    if kind < 4:
        return "".join(parts)
    if kind == 4:
        return f"({'|'.join(parts)})"
    return f"({parts[0]}){rng.choice(['?', '{1,3}', '{2}', '{0,2}'])}"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose values are short."""
    kind = rng.randrange(6 if depth else 4)
    if kind == 0:
        return {"type": "integer", "minimum": rng.randrange(10), "maximum": rng.randrange(10, 2000)}
    if kind == 1:
        return {"type": "string", "maxLength": rng.randrange(1, 5)}
    if kind == 2:
        return {"enum": rng.sample(["red", "réd", 7, True, None, "a b"], 3)}
    if kind == 3:
        return {"type": rng.choice(["boolean", "null"])}
    if kind == 4:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": 1, "maxItems": 2}
    names = rng.sample(["a", "bc", "dé", "x y"], 2)
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


def random_formats(count: int, seed: int = 1) -> list[ResponseFormat]:
    """Return as many of regexes as of schemas; their outputs hold no white space between JSON's parts."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) | {"x-guidance": {"whitespace_flexible": False}} for _ in range(count)]
    regexes = [ResponseFormat(regex=random_regex(rng)) for _ in range(count)]
    return [*(ResponseFormat(json_schema=json.dumps(one)) for one in schemas), *regexes]


def follows(text: str, form: ResponseFormat) -> bool:
    """Return whether a whole text follows a format of `random_formats`."""
    if form.regex:
        return re.fullmatch(form.regex, text) is not None
    try:
        return _is_valid(json.loads(text), json.loads(form.json_schema))
    except ValueError:
        return False


def _is_valid(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    types: dict[str, type] = {
        "integer": int,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    kind: type = type(value)
    if kind is not types[schema["type"]]:
        return False
    if schema["type"] == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if schema["type"] == "string":
        return bool(len(value) <= schema["maxLength"])
    if schema["type"] == "array":
        return 1 <= len(value) <= schema["maxItems"] and all(_is_valid(one, schema["items"]) for one in value)
    if schema["type"] == "object":
        properties = schema["properties"]
        is_known = all(name in properties and _is_valid(one, properties[name]) for name, one in value.items())
        return is_known and set(schema["required"]) <= set(value)
    return True
