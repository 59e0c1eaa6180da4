"""What the parts of every stage are told: where to work, and how much to leave out for a trial on a small machine."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.stages import PartFailed

SHOWN_LINES = 8
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class StagePlan:
    folder: Path
    device: str
    layers: int | None
    """Layers of large models; None for as many as a stage takes."""
    small: bool
    """Whether to do next to nothing of everything, to see that it works."""

    def command(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Run `python` with these words. Raise PartFailed, with the last lines it wrote, when it fails.

        What it writes goes to `logs/NAME.log`. Models are loaded in processes of their own, because an error on a GPU
        ends all work of its process.
        """
        run_logged(self.folder / "logs" / f"{name}.log", [sys.executable, *words], environment)


def run_logged(log: Path, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command in the project's folder. Raise PartFailed when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as written:
        own = None if environment is None else dict(environment)
        status = subprocess.run(
            words, cwd=ROOT, env=own or dict(os.environ), stdout=written, stderr=subprocess.STDOUT, check=False
        ).returncode
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-SHOWN_LINES:]
        raise PartFailed("\n".join([f"status {status}, see {log}; it ends with", *lines]))
