"""What commands print: names and paths as they are."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.progress import work_progress
from tests.commands import paceline_here

NAMES = ["[v2]", "[/x]", ":smile:"]
"""Rich would leave out the first, refuse the second, and show a face for the third."""


@pytest.mark.parametrize("name", NAMES)
def test_a_files_name_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    output = tmp_path / name / "plan.env"
    status, out, err = paceline_here("plan", "--memory", "8GiB", "--output", str(output))
    assert (status, err) == (0, "")
    assert f"settings: {output}" in out


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_category_is_shown_as_it_is_beside_its_progress(name: str) -> None:
    shown = StringIO()
    with work_progress(Console(file=shown, width=120)) as work:
        work.started(f"B = 8, {name}", 1)
        work.advanced()
    assert f"B = 8, {name}" in shown.getvalue()
