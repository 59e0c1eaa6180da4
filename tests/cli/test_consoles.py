"""What commands print: names and paths as they are."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.progress import work_progress
from tests.commands import ROOT, paceline_here

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


# A command that prints what a model wrote, to a terminal whose encoding has no such letters.
PRINTED = """
import sys
from paceline.cli import app
from paceline.cli.consoles import print_json, words_console

def printed():
    print("é€")
    words_console().print("😀")
    print_json({"text": "é😀"})

app.app = printed
app.main()
"""


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"\xe9\u20ac"), ("latin-1", r"é\u20ac"), ("utf-8", "é€")])
def test_an_output_is_shown_whatever_the_encoding(encoding: str, shown: str) -> None:
    code = [sys.executable, "-c", PRINTED]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(code, capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    text, _, found = done.stdout.decode(encoding).splitlines()
    assert (text, json.loads(found)) == (shown, {"text": "é😀"})
