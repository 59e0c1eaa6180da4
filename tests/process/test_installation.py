"""Installations with missing parts, and their error messages."""

import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.config import CoordinatorSettings
from draft_service.config import DraftSettings
from paceline import __version__
from paceline.cli import app as cli
from paceline.cli.app import app
from paceline.errors import StartupError
from paceline.measure.figures import check_plots
from paceline.measure.peers.llama_cpp import check_llama_cpp
from paceline.measure.prompts import read_text_codec
from paceline.process.settings import ServiceSettings, parse_settings
from target_service.config import TargetSettings
from tests.commands import ROOT, paceline_here, python_code

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
    "command",
    [
        ("generate", "2 + 2 ="),
        ("up",),
        ("demo",),
        ("load", "--rate", "1"),
        ("run", "--input", "{0}", "--output", "{0}.out"),
    ],
)
def test_a_command_that_would_start_services_says_once_what_they_lack(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """review A3"""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "2 + 2 ="}\n')
    monkeypatch.setitem(sys.modules, "torch", None)
    status, _, err = paceline_here(*(one.format(prompts) for one in command))
    assert status == 1
    assert err.count("this needs torch, which is not installed: pip install 'paceline[engine]'\n") == 1
    assert "Traceback" not in err


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
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paceline {__version__}\n"
    assert CliRunner().invoke(app, ["trace", "-h"]).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        (CoordinatorSettings, "paceline-coordinator"),
        (DraftSettings, "paceline-draft"),
        (TargetSettings, "paceline-target"),
    ],
)
def test_every_service_tells_its_version_and_its_name_as_it_was_called(
    kind: type[ServiceSettings], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """review A3, G11"""
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{command}"])
    for flag, words in (("--version", f"paceline {__version__}\n"), ("--help", f"usage: {command} [")):
        with pytest.raises(SystemExit) as end:
            parse_settings(kind, "service", [flag])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith(words)


def test_the_page_names_the_wheels_of_this_version() -> None:
    """review A4"""
    named = re.findall(r"paceline-([^-]+)-py3", (ROOT / "docs/use.md").read_text())
    assert set(named) == {__version__}


def test_every_command_of_an_installation_is_there() -> None:
    """review G11"""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(scripts) == ["paceline", "paceline-coordinator", "paceline-draft", "paceline-target"]
    for name, place in scripts.items():
        assert callable(EntryPoint(name, place, "console_scripts").load())


def test_the_library_says_that_it_has_types() -> None:
    """review A3"""
    assert files("paceline").joinpath("py.typed").is_file()
