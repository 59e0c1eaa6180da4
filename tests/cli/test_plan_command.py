"""`paceline plan`: it says what fits, and refuses what does not with its numbers."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import StartupError
from paceline.simulate.saved_costs import write_costs
from tests.commands import paceline_here
from tests.simulate.made_up_costs import saved_costs


def test_a_plan_is_told_drawn_and_written(tmp_path: Path) -> None:
    flags = ["--picture", str(tmp_path / "plan.svg"), "--output", str(tmp_path / "plan.env")]
    result = CliRunner().invoke(app, ["plan", "--memory", "4GiB", *flags])
    assert result.exit_code == 0, result.output
    for words in ("chosen", "least memory", "your settings", "the floor at 20 GB/s"):
        assert words in result.output
    assert "<svg" in (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert "PACELINE_TARGET_MEMORY=" in (tmp_path / "plan.env").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("first", "second"), [("--costs", "--output"), ("--costs", "--picture"), ("--picture", "--output")]
)
def test_no_file_of_a_plan_is_written_over_another(first: str, second: str, tmp_path: Path) -> None:
    """Measured costs, or the picture, were gone, and the command said that all was well."""
    path = tmp_path / "one"
    if first == "--costs":
        write_costs(path, saved_costs())
    before = path.read_bytes() if path.exists() else None
    status, out, err = paceline_here("plan", "--memory", "4GiB", first, str(path), second, str(path))
    assert (status, out) == (1, "")
    assert f"{second} {path} is the same file as {first} {path}" in err
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_memory_below_the_bound_is_refused_with_its_numbers() -> None:
    result = CliRunner().invoke(app, ["plan", "--memory", "64MiB", "--heads", "builtin:clover"])
    assert isinstance(result.exception, StartupError)
    assert "needs at least" in result.exception.message and "weights" in result.exception.message
    assert "nothing fits" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "1,5GiB"], "--memory '1,5GiB': give bytes such as 16GiB"),
        (["--memory", "8GiB", "--bandwidth-gb-s", "inf", "--tflop-s", "inf"], "give its numbers"),
    ],
)
def test_what_is_no_number_of_a_machine_is_refused(flags: list[str], words: str) -> None:
    status, _, err = paceline_here("plan", *flags)
    assert status == 1 and words in err


@pytest.mark.parametrize(
    ("variable", "device", "words"),
    [
        ("PACELINE_DRAFT_QUANTIZATION", "cpu", "int8 in the draft"),
        ("PACELINE_TARGET_QUANTIZATION", "cpu", "int8"),
        ("PACELINE_TARGET_QUANTIZATION", "cuda", "as they are"),
    ],
)
def test_your_settings_are_those_of_the_environment(
    variable: str, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "int8")
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = paceline_here("plan", "--memory", "16GiB", "--device", device)
    (own,) = (line for line in out.splitlines() if "your settings" in line)
    assert (status, own.split("│")[-2].strip()) == (0, words)


@pytest.mark.parametrize("role", ["TARGET", "DRAFT"])
def test_your_settings_have_the_dtypes_of_the_environment(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were told for the dtype of config.json, float32 here, whatever --dtype a service would read."""
    monkeypatch.setenv("COLUMNS", "160")

    def told() -> dict[str, list[str]]:
        status, out, _ = paceline_here("plan", "--memory", "16GiB")
        assert status == 0
        rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
        return {row[1]: row[2:4] for row in rows if len(row) == 9}  # memory and tokens/s

    before = told()
    monkeypatch.setenv(f"PACELINE_{role}_DTYPE", "bfloat16")
    assert {name for name, row in told().items() if row != before[name]} == {"your settings"}


def test_a_plan_for_heads_starts_no_draft_service(tmp_path: Path) -> None:
    output = tmp_path / "plan.env"
    assert paceline_here("plan", "--memory", "8GiB", "--heads", "builtin:clover", "--output", str(output))[0] == 0
    assert "PACELINE_DRAFT_MODEL=none" in output.read_text().splitlines()


def test_a_plan_for_heads_has_no_more_drafts_than_they_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """It promised the speed of eight, of heads that draft three."""
    monkeypatch.setenv("COLUMNS", "160")
    flags = ("--heads", "builtin:clover", "--acceptance", "0.97", "--conversations", "2")
    status, out, _ = paceline_here("plan", "--memory", "8GiB", *flags)
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    drafts = {row[1]: row[4] for row in rows if len(row) == 9}
    assert status == 0
    assert drafts == {"chosen": "3", "fastest": "3", "least memory": "1", "your settings": "3"}


@pytest.mark.parametrize("sizes", [{"num_attention_heads": 0}, {"vocab_size": 0}, {"hidden_size": -64}])
def test_sizes_below_one_are_no_decoders(tmp_path: Path, sizes: dict[str, int]) -> None:
    names = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    (tmp_path / "config.json").write_text(
        json.dumps(dict.fromkeys(names, 64) | {"max_position_embeddings": 64} | sizes)
    )
    status, _, err = paceline_here("plan", "--memory", "8GiB", "--target-model", str(tmp_path / "config.json"))
    assert status == 1 and "does not have the sizes of a decoder" in err


def test_a_target_alone_is_planned_without_drafts_and_without_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could see what a draft is worth beside its target: none was taken for a model's name."""
    monkeypatch.setenv("COLUMNS", "160")
    output = tmp_path / "plan.env"
    status, out, err = paceline_here("plan", "--memory", "8GiB", "--draft-model", "none", "--output", str(output))
    assert status == 0, err
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    assert {row[1]: row[4] for row in rows if len(row) == 9} == dict.fromkeys(
        ("chosen", "fastest", "least memory", "your settings"), "0"
    )
    assert [row for row in rows if row[1:2] == ["weights"] and len(row) == 4]  # of a single service
    assert "accepted by" not in out
    assert {"PACELINE_DRAFT_MODEL=none", "PACELINE_COORDINATOR_DRAFT_COUNT=0"} <= {*output.read_text().splitlines()}
