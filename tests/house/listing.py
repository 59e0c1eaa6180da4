"""The project's own files."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("draft_service", "target_service", "coordinator")


def tracked(*patterns: str) -> list[Path]:
    """Return the files of these patterns that git keeps."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


PAGES = [path for path in tracked("*.md") if path.name not in ("log.md", "CHANGELOG.md")]
"""Pages that tell how things are; the other two name files and settings as they were then."""


@cache
def imports(path: Path) -> set[str]:
    """Return absolute names of everything a file imports, `from a import b` as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(*packages: str) -> list[tuple[str, set[str]]]:
    """Return the modules of these packages, with what each imports."""
    return [
        (str(path.relative_to(ROOT)), imports(path))
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
        if "paceline/v1" not in str(path)
    ]
