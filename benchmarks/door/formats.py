"""Whether outputs with a JSON Schema follow it, and are those of plain decoding with the same mask."""

import json
import random
from typing import Any

from benchmarks.door.exact import Prompts
from benchmarks.door.http import HttpClient
from benchmarks.door.side_by_side import drafted_and_plain
from paceline.types import ResponseFormat
from tests.fakes.formats import follows, random_schema

MAX_NEW_TOKENS = 300
"""More than any output of the schemas has."""
NAMES = ("first", "second", "third")
SEED = 1


async def followed_counts(http: HttpClient, prompts: Prompts, count: int) -> tuple[int, int]:
    """Ask for outputs of as many schemas, half of them sampled; return how many are valid, and how many equal."""
    schemas = _formats(count)
    bodies = [_body(one, prompts[seed % len(prompts)], seed) for seed, one in enumerate(schemas)]
    pairs = await drafted_and_plain(http, bodies, "/v1/completions")
    valid = [
        one.drafted.finish_reason == "stop" and follows(one.drafted.text, schema)
        for one, schema in zip(pairs, schemas, strict=True)
    ]
    return sum(valid), sum(one.is_equal for one in pairs)


def _formats(count: int) -> list[ResponseFormat]:
    """Draw schemas of objects that hold enums, bounded strings and integers, arrays, and other objects."""
    rng = random.Random(SEED)
    schemas = [
        {
            "type": "object",
            "properties": {name: random_schema(rng) for name in NAMES},
            "required": NAMES,
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
        for _ in range(count)
    ]
    return [ResponseFormat(json_schema=json.dumps(one)) for one in schemas]


def _body(form: ResponseFormat, prompt: tuple[int, ...], seed: int) -> dict[str, Any]:
    schema = {"name": "output", "schema": json.loads(form.json_schema)}
    return {
        "prompt": prompt,
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": seed % 2,
        "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
