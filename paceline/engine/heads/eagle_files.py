"""EAGLE's heads in the files of others: those of EAGLE, EAGLE-2 and EAGLE-3, and of the library `speculators`.

It owns their names of settings and weights. What is the target's own is taken from the target: its embeddings, of which
some files have a copy, and for EAGLE its last norm and its head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.engine.heads.eagle import Eagle
from paceline.engine.heads.eagle3 import Eagle3
from paceline.engine.heads.interface import HeadsModule
from paceline.planning.heads import eagle_draft_count, eagle_tapped_layers, is_eagle_3, is_eagle_weight

LAYER = "body.layers.0."
NAMES = {
    "fusion_fc.": "fc.",
    "layers.": "body.layers.",
    "transformer.": LAYER,
    "embed_layernorm.": "embedded_norm.",
    "embedding_layernorm.": "embedded_norm.",
    "hidden_layernorm.": f"{LAYER}input_layernorm.",
    "lm_head_layernorm.": "output_norm.",
    "pre_lm_head_layernorm.": "output_norm.",
}
"""Beginnings of the names of weights, and ours."""
LAYER_3 = ("midlayer.", "layers.0.")
NAMES_3 = {
    **{f"{one}input_layernorm.": "embedded_norm." for one in LAYER_3},
    **{f"{one}hidden_norm.": f"{LAYER}input_layernorm." for one in LAYER_3},
    **dict.fromkeys(LAYER_3, LAYER),
    "lm_head.": "head.",
}
"""The same of EAGLE-3."""


def read_eagle(told: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[HeadsModule, Any]:
    """Return the heads of a file's configuration and weights, and the configuration of their layer.

    Raise KeyError, TypeError, ValueError or RuntimeError when they are none.
    """
    own = {name: weight for name, weight in weights.items() if is_eagle_weight(name, told)}
    if is_eagle_3(told):
        return _read_eagle_3(told, own, weights.get("d2t"))
    named = {_own(name, NAMES): weight for name, weight in own.items()}
    config = _layer_config(told, named)
    heads = Eagle(
        config,
        eagle_draft_count(told),
        has_bias="fc.bias" in named,
        has_norm=False,
        has_layer_norms="output_norm.weight" in named,
    )
    heads.load_state_dict(named)
    return heads, config


def _read_eagle_3(
    told: Mapping[str, Any], weights: Mapping[str, Tensor], larger_by: Tensor | None
) -> tuple[HeadsModule, Any]:
    """`larger_by` says by how much a token's number in the target's vocabulary is larger than its own; None: not."""
    named = {_own(name, NAMES_3): weight for name, weight in weights.items()}
    is_residual_normed = bool(told.get("norm_before_residual"))
    if is_residual_normed:
        named["hidden_norm.weight"] = named.pop(f"{LAYER}input_layernorm.weight")
    config = _layer_config(told, named)
    count = len(named["head.weight"])
    heads = Eagle3(
        config,
        eagle_draft_count(told),
        vocabulary_size=count,
        tapped_layers=eagle_tapped_layers(told),
        is_residual_normed=is_residual_normed,
        has_input_norm="input_norm.weight" in named,
        has_tap_norms="fc_norm.0.weight" in named,
        is_state_normed=bool(told.get("norm_output")),
    )
    named["token_ids"] = torch.arange(count) + (0 if larger_by is None else larger_by)
    heads.load_state_dict(named)
    return heads, config


def _own(name: str, names: Mapping[str, str]) -> str:
    found = next((one for one in names if name.startswith(one)), "")
    return names.get(found, "") + name.removeprefix(found)


def _layer_config(told: Mapping[str, Any], named: Mapping[str, Tensor]) -> Any:
    layer = dict(told.get("transformer_layer_config") or told)
    kind = layer.pop("model_type", "llama")
    # EAGLE names its layers Llama's even if queries, keys and values have a bias, as Qwen2's have and Llama's have not.
    is_qwen = kind == "llama" and f"{LAYER}self_attn.q_proj.bias" in named
    return AutoConfig.for_model("qwen2" if is_qwen else kind, **layer)
