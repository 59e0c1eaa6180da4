"""Installing the package compiles the kernels where possible, and needs no compiler elsewhere."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest

from hatch_build import LIBRARY, SOURCE, KernelsHook
from tests.tools import missing


class App:
    """The part of hatch's interface that the hook uses."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def build(root: Path, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the build data and the warnings."""
    (root / SOURCE).parent.mkdir(parents=True)
    (root / SOURCE).write_text(source)
    (root / LIBRARY).write_text("of an earlier build")
    app, build_data = App(), {"artifacts": [], "pure_python": True}
    hook: Any = KernelsHook
    hook(str(root), {}, None, None, "", "wheel", app).initialize("standard", build_data)
    return build_data, app.warnings


def test_where_there_is_a_compiler_the_package_has_a_library(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        missing("c++ is not installed; scripts/compiler installs Debian's")
    build_data, warnings = build(tmp_path, 'extern "C" int seven() { return 7; }')
    assert ctypes.CDLL(str(tmp_path / LIBRARY)).seven() == 7
    assert build_data["artifacts"] == [str(LIBRARY)]
    assert not build_data["pure_python"]
    assert build_data["tag"].startswith("py3-none-")
    assert not warnings


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler -v", "no-such-compiler"), ("false", "the compiler failed")]
)
def test_without_a_working_compiler_the_package_is_plain_python(
    compiler: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    build_data, (warning,) = build(tmp_path, "")
    assert words in warning
    assert build_data == {"artifacts": [], "pure_python": True}
    assert not (tmp_path / LIBRARY).exists()
