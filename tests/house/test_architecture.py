"""Files, folders and linked pages that the pages name exist."""

import html
import re
import runpy
from pathlib import Path

import pytest

from paceline.cli.prompts import SHOWN
from tests.house.listing import PAGES, ROOT

NAMED = re.compile(r"`((?:paceline|coordinator|draft_service|target_service|benchmarks|tests|scripts)/[\w/.-]+)`")
LINKED = re.compile(r"\]\(([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_or_links_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / link for link in LINKED.findall(text) if "://" not in link]
    missing = [path for path in (*(ROOT / name for name in NAMED.findall(text)), *linked) if not path.exists()]
    assert not missing


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "scripts/picture"))["picture"]()
    assert (ROOT / "docs/architecture.svg").read_text(encoding="utf-8") == drawn


def test_the_picture_of_the_demo_shows_its_prompts_and_fetches_nothing() -> None:
    drawn = (ROOT / "docs/demo.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"]+", drawn) == ["http://www.w3.org/2000/svg"]
    words = " ".join(html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)", drawn))).split())
    assert not [prompt for prompt in SHOWN if prompt not in words]


def test_the_readme_shows_the_page_in_light_and_dark_by_small_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in ("docs/page.png", "docs/page-dark.png"):
        assert f'"{path}"' in readme
        assert (ROOT / path).stat().st_size < 200_000


def test_the_architecture_names_a_file_of_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent for path in (ROOT / "coordinator").rglob("*.py")}
    assert not [room for room in rooms if str(room.relative_to(ROOT)) not in text]
