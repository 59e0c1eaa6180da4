"""Whole files: a complete file replaces another at once; an incomplete one never does."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.errors import InvalidRequest
from paceline.files import is_there, replace_file, replacing
from paceline.measure.figures import save_figure
from paceline.measure.synthetic import pair
from paceline.measure.synthetic.pair import PairOrder, write_pair
from paceline.measure.synthetic.shapes import SHAPES

pytestmark = pytest.mark.review

FORMER = "what was there"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    path.write_text(FORMER)
    return path


def test_a_file_is_replaced_at_the_end_and_not_before(path: Path) -> None:
    with replacing(path) as beside:
        beside.write_text("whole")
        assert path.read_text() == FORMER
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["out.json"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_what_was_there_stays_when_writing_is_interrupted(path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), replacing(path) as beside:
        beside.write_text("hal")
        raise failure
    assert path.read_text() == FORMER
    assert os.listdir(path.parent) == ["out.json"]


def test_a_disk_that_refuses_is_said_and_what_was_there_stays(path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"out\.json cannot be written: .*No space left"), replacing(path):
        Path("/dev/full").write_text("x")
    assert path.read_text() == FORMER


def test_a_replaced_file_keeps_its_mode_and_a_link_what_it_leads_to(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    replace_file(link, "whole")
    assert link.is_symlink()
    assert path.read_text() == "whole"
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_no_file_can_be_named_is_not_taken_for_a_name_that_is_free(path: Path) -> None:
    """As `Path.exists` takes it since Python 3.14: `paceline run` answered all lines for an output that cannot be."""
    assert [is_there(path), is_there(path.with_name("new.json"))] == [True, False]
    with pytest.raises(OSError, match="File name too long"):
        is_there(path.with_name("x" * 300))


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    replace_file(link, "gone")
    assert Path("/dev/null").is_char_device()


def test_a_plot_that_breaks_off_leaves_the_one_before(path: Path) -> None:
    """Review G1, for the measuring commands."""

    class Figure:
        def savefig(self, to: Path, **_: Any) -> None:
            Path(to).write_bytes(b"hal")
            raise OSError("No space left on device")

    with pytest.raises(InvalidRequest, match="cannot be written"):
        save_figure(cast(Any, Figure()), path)
    assert path.read_text() == FORMER


def test_an_interrupted_synthetic_pair_leaves_no_half_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review G1: a folder with some of a model's files looked like a model, and blocked the next try."""

    def write_half(folder: Path, *_: Any, **__: Any) -> None:
        folder.mkdir()
        (folder / "model-00001-of-00002.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(pair, "write_model", write_half)
    with pytest.raises(KeyboardInterrupt):
        write_pair(PairOrder("100m/5m", SHAPES["100m/5m"], tmp_path / "pair", factor=0.5), lambda *_: None)
    assert os.listdir(tmp_path / "pair") == []
