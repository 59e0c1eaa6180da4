"""A checkpoint whose weights can be exchanged under its name: tokenizer and shapes stay, and it says something else."""

import shutil
from pathlib import Path

WEIGHTS = "model.safetensors"
CHANGED = "model.norm.weight"
"""Scales what every choice is made of."""


class ChangingModel:
    """A copy of a checkpoint in a folder of its own, at first with its own weights."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._own, self._other = folder / "own", folder / "other"
        for copy in (self._own, self._other):
            shutil.copytree(source, copy)
        # Here, for it loads torch, which tests of the rest can do without.
        from safetensors.torch import load_file, save_file

        weights = load_file(self._other / WEIGHTS)
        weights[CHANGED] = weights[CHANGED].flip(0)
        save_file(weights, self._other / WEIGHTS, metadata={"format": "pt"})
        self.path = folder / source.name
        """What services are told to load."""
        self.path.symlink_to(self._own)

    def change(self) -> None:
        """Let whoever loads it from now on have other weights."""
        self._lead_to(self._other)

    def restore(self) -> None:
        self._lead_to(self._own)

    def _lead_to(self, folder: Path) -> None:
        self.path.unlink()
        self.path.symlink_to(folder)
