"""Functions are short enough to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.listing import ROOT, tracked

MOST_LINES = 40
"""Of a function, its signature counted and its docstring not."""
LONGER = {
    "paceline/engine/triton/attention_kernels.py: attend_kernel": "one pass over the keys, whose state is in registers",
    "training/__main__.py: train_grid": "half of it is flags",
}
"""Why each of these may be longer."""


def longer_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node, clean=False) else None
            told = _line_count(docstring) if docstring else 0
            if _line_count(node) - told > MOST_LINES:
                yield f"{path.relative_to(ROOT)}: {node.name}"


def _line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_other_function_is_longer_than_it_may_be() -> None:
    written = [path for path in tracked("*.py") if path.parent != ROOT / "paceline/v1"]
    assert ROOT / "paceline/client.py" in written
    assert {found for path in written for found in longer_functions(path)} == set(LONGER)
