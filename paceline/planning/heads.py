"""The sizes of heads that draft inside a target, from their folder; their weights are not read."""

import json
import re

from paceline.builtin import resolve_heads
from paceline.errors import ModelNotUsable
from paceline.planning.dimensions import stored_counts
from paceline.planning.search import HeadsSize

_LAYER = re.compile(r"body\.layers\.(\d+)\.")
"""How our own files name a tensor of a layer with keys and values."""


def read_heads_size(heads: str) -> HeadsSize:
    """Read a folder of heads or `builtin:NAME`. Raise ModelNotUsable."""
    folder = resolve_heads(heads)
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stated = 0 if "kind" in told else int(told.get("num_hidden_layers", 1))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelNotUsable(f"--heads {heads} cannot be read: {error!r}; give a folder of heads") from error
    stored = stored_counts(folder)
    if not stored:
        raise ModelNotUsable(f"--heads {heads} has no weights as safetensors; give a folder of heads")
    own = {found[1] for name in stored if (found := _LAYER.match(name))}
    return HeadsSize(sum(stored.values()), len(own) or stated)
