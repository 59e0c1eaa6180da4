"""What `python -m benchmarks.*` says of wrong files and values."""

from pathlib import Path
from typing import NoReturn

import pytest
import typer

from benchmarks.commands import run_command
from paceline.errors import InvalidRequest

READS = typer.Typer()


@READS.command()
def read() -> None:
    Path("/nowhere/question.jsonl").read_text()


def refuse() -> NoReturn:
    raise InvalidRequest("--input x has no category 'art'; give another", field="input")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (READS, "No such file or directory: '/nowhere/question.jsonl'"),
        (refuse, "--input x has no category 'art'; give another"),
    ],
)
def test_a_wrong_file_or_value_is_one_line(command: typer.Typer, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark"])
    with pytest.raises(SystemExit) as ended:
        run_command(command)
    assert isinstance(ended.value.code, str)  # Python writes it to stderr, and the status is 1
    assert words in ended.value.code and "\n" not in ended.value.code
