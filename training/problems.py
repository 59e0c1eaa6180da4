"""GSM8K problems as chat text whose answers read like worked arithmetic.

It owns the text format and the split into seen and unseen problems. It knows nothing of tokens or models.

GSM8K (Cobbe et al., arXiv 2110.14168) marks each calculation as `<<48/2=24>>`. Here the mark moves to the end of its
line as `[48/2=24]`, where a reader can check it:

    Natalia sold 48/2 = 24 clips in May. [48/2=24]
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidRequest

UNSEEN_COUNT = 300
"""The last problems of the file are never trained on: not by the tokenizer, the target or the draft."""

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"(?<![\d.,/])\d+(?:\.\d+)?(?![\d%/]|[.,]\d)")
_ANY_NUMBER = re.compile(r"\d*\.\d+|\d+")
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Problem:
    question: str
    lines: tuple[str, ...]
    """Worked lines, which still have GSM8K's marks."""
    result: str

    @property
    def answer(self) -> str:
        """Text that the target learns to write."""
        return "\n".join([*(_show_marks(line) for line in self.lines), f"Answer: {self.result}"])


def load(path: Path) -> tuple[list[Problem], list[Problem]]:
    """Read a GSM8K file and return its (seen, unseen) problems. Raise InvalidRequest when it is none."""
    problems = []
    for number, row in enumerate(path.read_bytes().split(b"\n"), 1):
        if not row.strip():
            continue
        try:
            problems.append(_parse(json.loads(row)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidRequest(
                f"line {number} of --data {path} is no problem of GSM8K ({error!r}); give its train.jsonl", field="data"
            ) from error
    if len(problems) <= UNSEEN_COUNT:
        raise InvalidRequest(
            f"--data {path} has {len(problems)} problems, and nothing learns from the last {UNSEEN_COUNT}; give more",
            field="data",
        )
    return problems[:-UNSEEN_COUNT], problems[-UNSEEN_COUNT:]


def prompt_text(question: str) -> str:
    """Format a question as the chat template does."""
    return f"<|user|>{question}<|assistant|>"


def _parse(row: dict[str, str]) -> Problem:
    body, _, result = row["answer"].partition("####")
    lines = tuple(" ".join(line.split()) for line in body.split("\n") if line.strip())
    return Problem(" ".join(row["question"].split()), lines, result.strip().replace(",", ""))


def _show_marks(line: str) -> str:
    marks = [f"{left.replace(' ', '')}={right}" for left, right in _MARK.findall(line)]
    text = _MARK.sub("", line)
    return f"{text} [{'; '.join(marks)}]" if marks else text


def vary(problem: Problem, rng: random.Random) -> Problem:
    """Return the problem with other numbers if its marks let every step be recomputed, else the problem itself.

    A small model that sees the same numbers every epoch remembers them. Fresh numbers make it copy them from the
    question, as it must on a problem it never saw.
    """
    for _ in range(4):
        new_value = {
            text: str(_shift(int(text), rng))
            for text in set(_NUMBER.findall(problem.question))
            if "." not in text and int(text) > 3
        }
        if new_value and _recompute(problem.lines, new_value):
            return Problem(
                _substitute(problem.question, new_value),
                tuple(_substitute(line, new_value) for line in problem.lines),
                new_value.get(problem.result, problem.result),
            )
    return problem


def _shift(value: int, rng: random.Random) -> int:
    step = 10 if value % 10 == 0 and value > 20 else 1
    return max(2, value // step + rng.randint(-(value // step) // 2, value // step // 2)) * step


def _recompute(lines: Iterable[str], new_value: dict[str, str]) -> bool:
    """Follow the marks in order and add each new result to `new_value`; False when a step has no clean new value."""
    for left, right in _MARK.findall("\n".join(lines)):
        value = _evaluate(_substitute(left, new_value))
        if value is None or value < 0 or ("." not in right and value != int(value)):
            return False
        text = f"{value:.10g}"
        if len(text) > 8 or new_value.setdefault(right, text) != text:
            return False
    return True


def _substitute(text: str, new_value: dict[str, str]) -> str:
    return _ANY_NUMBER.sub(lambda match: new_value.get(match[0], match[0]), text)


def _evaluate(expression: str) -> float | None:
    """Compute `+ - * /` over numbers; None for anything else."""
    try:
        return _fold(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError, TypeError):
        return None


def _fold(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_fold(node.left), _fold(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    raise TypeError(type(node).__name__)
