"""The digest of weight files: its inputs, when its record is believed, and that it covers the loaded bytes."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from paceline.engine.model import weights_digest
from paceline.engine.model.weights_digest import LEAST_KEPT_BYTES, RECORD, SETTLED_NS, reading_with_digest
from paceline.errors import ModelNotUsable

pytestmark = pytest.mark.review  # C1

HASHED: list[str] = []


@pytest.fixture(autouse=True)
def small_files_are_worth_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep records of small files too, and note hashed files."""
    hash_file = weights_digest._sha256
    HASHED.clear()

    def noted(file: Path) -> str:
        HASHED.append(file.name)
        return hash_file(file)

    monkeypatch.setattr(weights_digest, "_sha256", noted)
    monkeypatch.setattr(weights_digest, "LEAST_KEPT_BYTES", 1)


def write(folder: Path, **contents: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)
    return [folder / name for name in contents]


def later() -> int:
    """Return a time at which files written just now are settled."""
    return time.time_ns() + 2 * SETTLED_NS


def digest(files: list[Path]) -> str:
    return reading_with_digest(files[0].parent, files, lambda: None, later)[1]


def test_it_is_the_contents_and_neither_names_nor_places_nor_order(tmp_path: Path) -> None:
    files = write(tmp_path / "one", a="first", b="second")
    other = write(tmp_path / "two", x="second", y="first")
    assert digest(files) == digest(files[::-1]) == digest(other)
    assert digest(files) != digest(write(tmp_path / "three", a="first", b="another"))
    assert digest(files) != digest(files[:1])


def test_it_is_computed_once_and_what_the_record_says_is_sha256(tmp_path: Path) -> None:
    files = write(tmp_path, a="first", b="second")
    found = digest(files)
    assert sorted(HASHED) == ["a", "b"]
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["a"]["sha256"] == hashlib.sha256(b"first").hexdigest()
    assert digest(files) == found
    assert len(HASHED) == 2


def test_a_file_that_the_index_names_by_its_whole_path_is_kept_too(tmp_path: Path) -> None:
    """Such a checkpoint was reported as half written."""
    (elsewhere,) = write(tmp_path / "elsewhere", a="first")
    (tmp_path / "model").mkdir()
    for _ in range(2):
        found = reading_with_digest(tmp_path / "model", [elsewhere], lambda: None, later)[1]
        assert found == digest([elsewhere])
    assert HASHED == ["a", "a"], "by each folder's record once"


@pytest.mark.parametrize("change", ["content of another size", "content", "times", "name"])
def test_a_record_of_other_files_is_not_believed(tmp_path: Path, change: str) -> None:
    """Any change counts; content alone may keep size and modification time, as copying tools do."""
    files = write(tmp_path, a="first", b="second")
    found, status = digest(files), files[0].stat()
    if change.startswith("content"):
        files[0].write_text("FIRST" if change == "content" else "longer than before")
        os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "times":
        os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        files[0] = files[0].rename(tmp_path / "c")
    assert (digest(files) == found) == (change in ("times", "name"))
    assert HASHED[2:] == [files[0].name]


@pytest.mark.parametrize("content", ["{half", "[]", "null", '{"a": 5}', '{"a": {"stamp": []}}', '{"a": {"sha256": 1}}'])
def test_a_record_that_is_none_is_written_anew(tmp_path: Path, content: str) -> None:
    files = write(tmp_path, a="first")
    (tmp_path / RECORD).write_text(content)
    found = digest(files)
    assert digest(files) == found
    assert HASHED == ["a"]


def test_files_that_may_change_again_without_a_sign_and_small_ones_leave_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path, a="first")
    reading_with_digest(tmp_path, files, lambda: None)
    monkeypatch.setattr(weights_digest, "LEAST_KEPT_BYTES", LEAST_KEPT_BYTES)
    digest(files)
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_cannot_be_written_costs_only_the_record(tmp_path: Path) -> None:
    files = write(tmp_path, a="first")
    (tmp_path / RECORD).mkdir()
    assert digest(files) == digest(files)
    assert HASHED == ["a", "a"]


def test_files_that_change_while_they_are_loaded_are_refused(tmp_path: Path) -> None:
    """Otherwise the digest could describe other weights than the loaded ones."""
    files = write(tmp_path, a="first")
    with pytest.raises(ModelNotUsable, match="a changed while it was read; start again when it is whole"):
        reading_with_digest(tmp_path, files, lambda: files[0].write_text("longer than before"))
