"""The sizes of heads that draft inside a target, from their folder; their weights are not read."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.builtin import resolve_heads
from paceline.errors import ModelNotUsable
from paceline.planning.dimensions import stored_counts
from paceline.planning.search import HeadsSize

_LAYER = re.compile(r"body\.layers\.(\d+)\.")
"""How our own files name a tensor of a layer with keys and values."""
_EAGLE_3_TABLES = ("d2t", "t2d")
"""Tables of tokens in files of EAGLE-3, by the draft's numbers and the target's."""
_EAGLE_DRAFT_COUNT = 5
"""Tokens to draft where the file does not say: the depth of EAGLE's trees."""
_EAGLE_3_TAPS = 3
"""Layers of the target that EAGLE-3 reads beside the last where its file names none."""


def read_heads_size(heads: str) -> HeadsSize:
    """Read a folder of heads or `builtin:NAME`. Raise ModelNotUsable."""
    folder = resolve_heads(heads)
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stated, tapped = (0, 1) if "kind" in told else (int(told.get("num_hidden_layers", 1)), _tapped_count(told))
        draft_count = int(told["settings"]["draft_count"]) if "kind" in told else eagle_draft_count(told)
        if draft_count < 1:
            raise ValueError(f"they draft {draft_count} tokens")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotUsable(f"--heads {heads} cannot be read: {error!r}; give a folder of heads") from error
    stored = stored_counts(folder)
    if not stored:
        raise ModelNotUsable(f"--heads {heads} has no weights as safetensors; give a folder of heads")
    own = {found[1] for name in stored if (found := _LAYER.match(name))}
    layer_count = len(own) or stated
    loaded = sum(count for name, count in stored.items() if "kind" in told or is_eagle_weight(name, told))
    return HeadsSize(loaded, layer_count, tapped if layer_count else 0, draft_count)


def eagle_draft_count(told: Mapping[str, Any]) -> int:
    """Return how many tokens heads in others' files are to draft for a round, by their configuration."""
    proposals = (told.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(proposals[0].get("speculative_tokens", _EAGLE_DRAFT_COUNT))


def is_eagle_3(told: Mapping[str, Any]) -> bool:
    return told.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in told


def is_eagle_weight(name: str, told: Mapping[str, Any]) -> bool:
    """Return whether a weight in others' files is the heads' own: embeddings, and EAGLE's output head, are copies."""
    if name.startswith("embed_tokens."):
        return False
    return name not in _EAGLE_3_TABLES if is_eagle_3(told) else not name.startswith("lm_head.")


def eagle_tapped_layers(told: Mapping[str, Any]) -> Sequence[int]:
    """Return the target's layers of which EAGLE-3 reads what goes in, beside the last; none where the file has none.

    They are read in the target's order, whatever the file's. `speculators` names them so, by an entry of its own.
    SpecForge and ModelOpt, whose entry lies in `eagle_config`, name a layer by what comes out of it, and layer 1 is
    their first. A few files have the others' numbers there too.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    if stated := told.get(name):
        return sorted(int(one) for one in stated)
    layers = sorted(int(one) for one in (told.get("eagle_config") or {}).get(name) or ())
    return [one + 1 for one in layers] if layers[:1] == [1] else layers


def _tapped_count(told: Mapping[str, Any]) -> int:
    """Return how many results of the target's layers the heads of others' files read."""
    return 1 + len(eagle_tapped_layers(told) or range(_EAGLE_3_TAPS)) if is_eagle_3(told) else 1
