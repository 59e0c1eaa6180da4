"""Drafts with which speculation must not lose, made from the built-in one: never right, and ten times as slow."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.builtin import resolve_model

SLOWER = 10
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
ADDS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""Weights through which a layer adds to its input."""


def write_random_draft(folder: Path) -> Path:
    """Write the built-in draft with random weights: it is equally fast, and right only by chance."""
    weights = _copy(folder)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.dim() > 1:
            weights[name] = torch.randn(tensor.shape, generator=generator).mul(0.05).to(tensor.dtype)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


def write_slow_draft(folder: Path) -> Path:
    """Write the built-in draft with `SLOWER` times its layers; it is right as often, because new layers add nothing."""
    weights = _copy(folder)
    config = json.loads((folder / CONFIG).read_text())
    layer_count = config["num_hidden_layers"]
    for layer in range(layer_count, SLOWER * layer_count):
        for name in [one for one in weights if one.startswith("model.layers.0.")]:
            tensor = weights[name]
            copied = torch.zeros_like(tensor) if name.endswith(ADDS) else tensor.clone()
            weights[name.replace(".0.", f".{layer}.", 1)] = copied
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config | {"num_hidden_layers": SLOWER * layer_count}))
    return folder


def _copy(folder: Path) -> dict[str, torch.Tensor]:
    """Copy the built-in draft into the folder, and return its weights."""
    source = resolve_model("builtin:draft")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return load_file(source / WEIGHTS)
