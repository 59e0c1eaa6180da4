"""Places that models come from: a directory, what is built in, and the hub's repositories.

It owns hub ids with their revisions, and the download. It does not know what is in the files.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from paceline.builtin import resolve_model
from paceline.errors import ModelNotUsable

_HUB_ID = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w./-]*))?")
_TWICE = ("consolidated*.safetensors", "original/*")
"""Patterns of weights that a repository has once more, in their maker's own form. Nothing reads them."""


def folder_of(model: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a directory, of `builtin:NAME`, or of a hub id with or without `@REVISION`.

    Of a hub id the files that match a pattern are fetched, unless the hub's cache has them. Raise ModelNotUsable.
    """
    return local_folder(model) or _fetched(model, patterns)


def local_folder(model: str) -> Path | None:
    """Return the folder of a directory or of `builtin:NAME`; None for a hub id. Raise ModelNotUsable for all else."""
    folder = resolve_model(model)
    if os.path.isdir(folder):  # false for what can be no name too
        return folder
    if _HUB_ID.fullmatch(model):
        return None
    raise ModelNotUsable(
        f"model {model!r} is not a directory; give the path of a Hugging Face checkpoint, or a hub id such as "
        "Qwen/Qwen3-0.6B, with a revision if you like: Qwen/Qwen3-0.6B@main"
    )


def _fetched(model: str, patterns: Sequence[str]) -> Path:
    hub_id = _HUB_ID.fullmatch(model)
    assert hub_id
    try:
        folder = snapshot_download(
            hub_id["repository"],
            revision=hub_id["revision"],
            allow_patterns=[*patterns],
            ignore_patterns=[*_TWICE],
        )
    except (OSError, HFValidationError) as error:  # the hub's other errors are OSErrors
        reason = str(error).strip().split("\n")[0]
        # The hub does not tell a stranger whether a private repository is there.
        remedy = "; if it is private or gated, set HF_TOKEN" if isinstance(error, RepositoryNotFoundError) else ""
        raise ModelNotUsable(
            f"model {model!r} is no directory here and cannot be had from the hub: {reason}{remedy}"
        ) from error
    return Path(folder)
