"""Pages for people: their tables are whole, and a picture shows what the page beside it tells."""

import re
from collections import Counter
from itertools import pairwise

from tests.house.listing import ROOT, tracked


def test_every_row_of_a_table_stands_under_its_head() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in tracked("*.md")}
    assert ROOT / "docs/metrics.md" in pages
    for path, page in pages.items():
        lines = ["", *page.splitlines(), ""]
        for before, (line, after) in zip(lines, pairwise(lines[1:]), strict=False):
            if line.startswith("|") and not before.startswith("|"):
                assert re.match(r"\|[ :-]*-", after), f"{path}: no head above {line!r}"


def anchors(page: str) -> set[str]:
    """Return the names of a page's headings in links, as GitHub and others make them."""
    found = Counter[str]()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def test_what_is_linked_within_a_page_is_a_heading_there() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in tracked("*.md")}
    linked = [
        (path, link, (path.parent / name).resolve() if name else path, anchor)
        for path, page in pages.items()
        for link, name, anchor in re.findall(r"\]\((([^)\s#:]*)#([^)\s]+))\)", page)
    ]
    assert len(linked) > 50
    assert not [(str(path), link) for path, link, to, anchor in linked if anchor not in anchors(pages[to])]


def test_the_picture_of_a_trace_shows_attributes_that_the_page_tells() -> None:
    page, picture = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("tracing.md", "trace.svg"))
    shown = set(re.findall(r"(paceline\.[\w.]+) =", picture))
    assert shown
    for name in shown:
        told = [line for line in page.splitlines() if f".{name.split('.')[-1]}`" in line]
        assert any("`round`" in line for line in told), f"tracing.md tells nothing of {name} of a round"
