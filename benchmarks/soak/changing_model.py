"""A checkpoint whose weights can be exchanged under its name, so that it gives other tokens; all else stays."""

import shutil
from pathlib import Path

WEIGHTS = "model.safetensors"
CHANGED = "model.norm.weight"
"""Weight that changes; it scales the input of every choice."""


class ChangingModel:
    """A copy of a checkpoint in a folder of its own, at first with the original weights."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._own, self._other = folder / "own", folder / "other"
        for copy in (self._own, self._other):
            shutil.copytree(source, copy)
        # Imported here because it loads torch, which other tests do not need.
        from safetensors.torch import load_file, save_file

        weights = load_file(self._other / WEIGHTS)
        weights[CHANGED] = weights[CHANGED].flip(0)
        save_file(weights, self._other / WEIGHTS, metadata={"format": "pt"})
        self.path = folder / source.name
        """Path that services load."""
        self.path.symlink_to(self._own)

    def change(self) -> None:
        """Give other weights to services that load the model from now on."""
        self._lead_to(self._other)

    def restore(self) -> None:
        self._lead_to(self._own)

    def _lead_to(self, folder: Path) -> None:
        self.path.unlink()
        self.path.symlink_to(folder)
