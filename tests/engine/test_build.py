"""Installing the package compiles its libraries where possible, and needs no compiler elsewhere."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest

from hatch_build import SOURCES, CompiledHook, library_of
from tests.tools import missing


class App:
    """The part of hatch's interface that the hook uses."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def build(root: Path, *texts: str) -> tuple[dict[str, Any], list[str]]:
    """Build libraries of sources with these texts; return the build data and the warnings."""
    for source, text in zip(SOURCES, texts, strict=True):
        (root / source).parent.mkdir(parents=True)
        (root / source).write_text(text)
        (root / library_of(source)).write_text("of an earlier build")
    app, build_data = App(), {"artifacts": [], "pure_python": True}
    hook: Any = CompiledHook
    hook(str(root), {}, None, None, "", "wheel", app).initialize("standard", build_data)
    return build_data, app.warnings


def has_compiler() -> None:
    if shutil.which("c++") is None:
        missing("c++ is not installed; scripts/compiler installs Debian's")


def test_where_there_is_a_compiler_the_package_has_its_libraries(tmp_path: Path) -> None:
    has_compiler()
    numbers = 7, 8
    build_data, warnings = build(tmp_path, *(f'extern "C" int number() {{ return {n}; }}' for n in numbers))
    libraries = [library_of(source) for source in SOURCES]
    assert [ctypes.CDLL(str(tmp_path / one)).number() for one in libraries] == list(numbers)
    assert build_data["artifacts"] == [str(one) for one in libraries]
    assert not build_data["pure_python"]
    assert build_data["tag"].startswith("py3-none-")
    assert not warnings


def test_a_compiler_that_cannot_make_code_by_parts_makes_it_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_compiler()
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-flto*) echo no linker for it >&2; exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    build_data, warnings = build(tmp_path, "", "")
    assert build_data["artifacts"] == [str(library_of(source)) for source in SOURCES]
    assert not warnings


def test_a_library_that_cannot_be_compiled_leaves_the_other(tmp_path: Path) -> None:
    has_compiler()
    build_data, (warning,) = build(tmp_path, "no C++", "")
    assert "libkernels.so is left out" in warning
    assert build_data["artifacts"] == [str(library_of(SOURCES[1]))]
    assert not build_data["pure_python"]


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler -v", "no-such-compiler"), ("false", "the compiler failed")]
)
def test_without_a_working_compiler_the_package_is_plain_python(
    compiler: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    build_data, warnings = build(tmp_path, "", "")
    assert len(warnings) == len(SOURCES) and all(words in one for one in warnings)
    assert build_data == {"artifacts": [], "pure_python": True}
    assert not any((tmp_path / library_of(source)).exists() for source in SOURCES)
