"""Prompts from a file of JSON lines: `{"prompt": ...}`, or the first turn of SpecBench's `{"turns": [...]}`.

A line may also have the output that is expected for it, as `prediction`.

Owns the file's format; knows nothing of the use of the prompts.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest

STDIN = Path("-")


@dataclass(frozen=True)
class InputLine:
    id: Any
    """The line's own `id` or `question_id`, else its line number."""
    prompt: str | None
    error: str | None = None
    """The reason why the line has no prompt; None for a valid line."""
    category: str | None = None
    prediction: str | None = None
    """The output that is expected; None: none is."""


def read_lines(path: Path) -> list[InputLine]:
    """Read every line that is not blank; `-` means standard input. A wrong line gets an error.

    Raise InvalidRequest when the file cannot be read or holds no line.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig") if path == STDIN else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--input {path} cannot be read: {error}", field="input") from error
    # `splitlines` would also split at U+2028 and its like, which JSON strings may hold unescaped.
    lines = [_parse(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"--input {path} holds no lines; give one JSON object a line", field="input")
    return lines


def _parse(number: int, line: str) -> InputLine:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        return InputLine(number, None, f"line {number} is not JSON: {error}")
    if not isinstance(row, dict):
        return InputLine(number, None, f"line {number} is not a JSON object")
    turns = row.get("turns")
    prompt = row.get("prompt")
    if prompt is None and isinstance(turns, list) and turns:  # tables write null for what a line lacks
        prompt = turns[0]
    line_id = row.get("id", row.get("question_id", number))
    category, prediction = row.get("category"), row.get("prediction")
    if not isinstance(prompt, str):
        return InputLine(line_id, None, f"line {number} has neither a `prompt` string nor `turns` with one")
    if prediction is not None and not isinstance(prediction, str):
        return InputLine(line_id, None, f"line {number} has a `prediction` that is no string")
    return InputLine(line_id, prompt, None, category if isinstance(category, str) else None, prediction)
