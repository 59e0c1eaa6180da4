"""`paceline plan`: it says what fits, and refuses what does not with its numbers."""

from pathlib import Path

from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import StartupError


def test_a_plan_is_told_drawn_and_written(tmp_path: Path) -> None:
    flags = ["--picture", str(tmp_path / "plan.svg"), "--output", str(tmp_path / "plan.env")]
    result = CliRunner().invoke(app, ["plan", "--memory", "4GiB", *flags])
    assert result.exit_code == 0, result.output
    for words in ("chosen", "least memory", "your settings", "the floor at 20 GB/s"):
        assert words in result.output
    assert "<svg" in (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert "PACELINE_TARGET_MEMORY=" in (tmp_path / "plan.env").read_text(encoding="utf-8")


def test_a_memory_below_the_bound_is_refused_with_its_numbers() -> None:
    result = CliRunner().invoke(app, ["plan", "--memory", "64MiB", "--heads", "builtin:clover"])
    assert isinstance(result.exception, StartupError)
    assert "needs at least" in result.exception.message and "weights" in result.exception.message
    assert "nothing fits" in result.output
