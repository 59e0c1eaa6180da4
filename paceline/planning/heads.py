"""The sizes of heads that draft inside a target, from their folder; their weights are not read."""

import json

from paceline.builtin import resolve_heads
from paceline.errors import ModelNotUsable
from paceline.planning.dimensions import stored_parameters
from paceline.planning.search import HeadsSize

_LAYERS = {"medusa": 0, "clover": 0, "clover2": 2, "eagle": 1}
"""Layers with keys and values, by the kinds of our own files."""


def read_heads_size(heads: str) -> HeadsSize:
    """Read a folder of heads or `builtin:NAME`. Raise ModelNotUsable."""
    folder = resolve_heads(heads)
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layer_count = _LAYERS[told["kind"]] if "kind" in told else int(told.get("num_hidden_layers", 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotUsable(f"--heads {heads} cannot be read: {error!r}; give a folder of heads") from error
    count = stored_parameters(folder)
    if count is None:
        raise ModelNotUsable(f"--heads {heads} has no weights as safetensors; give a folder of heads")
    return HeadsSize(count, layer_count)
