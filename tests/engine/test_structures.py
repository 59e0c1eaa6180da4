"""The arguments of the compiled functions are described in two languages, which say the same."""

import ctypes
import re
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engine.native import choices, kernels, products
from paceline.engine.native.kernels import LIBRARY, SOURCES, find_kernels
from paceline.engine.native.structures import STRUCTURES, GateCall, check_sizes
from tests.tools import built_kernels

SOURCE = re.sub(r"//.*", "", "".join(one.read_text(encoding="utf-8") for one in SOURCES))
KINDS: dict[Any, str] = {
    ctypes.c_int64: "int64_t",
    ctypes.c_float: "float",
    **{own: name for name, own in STRUCTURES.items()},
}


def fields_in_source(name: str) -> Iterator[tuple[str, str]]:
    """Yield name and type of each field, `pointer` for every type of those."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", SOURCE, re.DOTALL)
    assert body, f"the library has no structure {name}"
    for statement in filter(None, map(str.strip, body[1].split(";"))):
        if function := re.search(r"\(\*(\w+)\)", statement):
            yield function[1], "pointer"
            continue
        kind = statement.removeprefix("const ").split()[0]
        is_function = f"typedef void (*{kind})" in SOURCE
        for declared in statement.split(","):
            yield re.findall(r"\w+", declared)[-1], "pointer" if "*" in declared or is_function else kind


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_has_the_fields_that_the_source_declares(name: str) -> None:
    described = [(field[0], KINDS.get(field[1], "pointer")) for field in STRUCTURES[name]._fields_]
    assert described == list(fields_in_source(name))


def test_a_structure_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built_kernels()
    library = ctypes.CDLL(str(LIBRARY))
    check_sizes(library)
    monkeypatch.setattr("paceline.engine.native.structures.STRUCTURES", {**STRUCTURES, "Norm": GateCall})
    with pytest.raises(AttributeError, match="the library's Norm has 56 bytes, and GateCall of structures.py 32"):
        check_sizes(library)
    assert find_kernels.__wrapped__() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WIDEST", kernels.WIDEST),
        ("QUERIES", kernels.QUERIES),
        ("MOST_RANKED", choices.MOST_RANKED),
        ("COLUMNS", products.COLUMNS),
    ],
)
def test_constants_are_those_of_the_source(name: str, value: int) -> None:
    assert re.findall(rf"constexpr \w+ {name} = (\d+);", SOURCE) == [str(value)]


def test_head_sizes_are_those_of_the_source() -> None:
    assert re.findall(r"case (\d+):", SOURCE) == [str(size) for size in kernels.HEAD_SIZES]
