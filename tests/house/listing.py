"""The project's own files."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Return the files of these patterns that git keeps."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split()]


PAGES = [path for path in tracked("*.md") if path.name not in ("log.md", "CHANGELOG.md")]
"""Pages that tell how things are; the other two name files and settings as they were then."""
