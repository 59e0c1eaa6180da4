"""Installations with missing parts, and their error messages."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from paceline.cli import app as cli
from paceline.cli.app import app
from paceline.errors import StartupError
from paceline.measure.figures import check_plots
from paceline.measure.peers.llama_cpp import check_llama_cpp
from paceline.measure.prompts import read_text_codec
from tests.commands import python_code

pytestmark = pytest.mark.review
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from {0}.__main__ import main; sys.argv = ['{0}']; main()"


@pytest.mark.parametrize("service", ["draft_service", "target_service"])
def test_a_service_without_the_engines_libraries_says_what_to_install(service: str) -> None:
    """review A3"""
    status, _, err = python_code(WITHOUT_TORCH.format(service))
    assert status == 1
    assert err.splitlines()[-1] == (
        f"{service}: this needs torch, which is not installed: pip install 'paceline[engine]'"
    )
    assert "Traceback" not in err


def test_a_command_without_the_engines_libraries_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """review A3"""

    def miss() -> None:
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    monkeypatch.setattr(cli, "app", miss)
    with pytest.raises(SystemExit):
        cli.main()
    assert (
        capsys.readouterr().err
        == "paceline: this needs torch, which is not installed: pip install 'paceline[engine]'\n"
    )


@pytest.mark.parametrize(
    ("module", "use", "extra"),
    [
        ("llama_cpp", lambda: check_llama_cpp(None), "llama-cpp"),
        ("matplotlib.figure", check_plots, "bench"),
        ("paceline.engine.model.checkpoint", lambda: read_text_codec("builtin:target", "builtin:draft"), None),
    ],
)
def test_measuring_names_a_missing_extra_as_everything_does_and_takes_no_other_failure_for_one(
    module: str, use: Callable[[], object], extra: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if extra is None:
        with pytest.raises(ModuleNotFoundError):
            use()
    else:
        with pytest.raises(StartupError, match=rf"this needs .*: pip install 'paceline\[{extra}\]'"):
            use()


def test_the_command_tells_its_version_and_takes_short_help() -> None:
    """review A3, G11"""
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paceline {version('paceline')}\n"
    assert CliRunner().invoke(app, ["trace", "-h"]).exit_code == 0


def test_the_library_says_that_it_has_types() -> None:
    """review A3"""
    assert files("paceline").joinpath("py.typed").is_file()
