"""Files of heads: a folder with `config.json` and weights as safetensors.

In our own form the configuration has the kind, what the kind's constructor takes, and the target's own configuration.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from paceline.engine.heads.clover import Clover
from paceline.engine.heads.clover2 import Clover2
from paceline.engine.heads.eagle import Eagle
from paceline.engine.heads.eagle_files import read_eagle
from paceline.engine.heads.interface import HeadsModule
from paceline.engine.heads.medusa import Medusa
from paceline.errors import ModelNotUsable

CONFIG, WEIGHTS = "config.json", "model.safetensors"
KINDS: dict[str, type[Any]] = {one.kind: one for one in (Medusa, Clover, Clover2, Eagle)}


def new_heads(kind: str, config: Any, **settings: Any) -> Any:
    """Make untrained heads for a target with this configuration of transformers."""
    return KINDS[kind](config, **settings)


def write_heads(heads: HeadsModule, config: Any, folder: Path) -> None:
    """Write heads; `config` is the target's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    target = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    told = {"kind": heads.kind, "settings": heads.settings(), "target": target}
    (folder / CONFIG).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: one.contiguous() for name, one in heads.state_dict().items()}, folder / WEIGHTS)


def read_heads(folder: Path) -> tuple[HeadsModule, Any]:
    """Return heads and their target's configuration. Raise ModelNotUsable."""
    try:
        told = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        heads, config = _read(told, _weights(folder))
    except Exception as error:  # what configurations may say wrong raises many kinds
        raise ModelNotUsable(f"--heads {folder} cannot be read: {error!r}; give a folder of heads, or none") from error
    heads.eval()
    return heads.to(torch.float32), config


def _read(told: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[HeadsModule, Any]:
    if "kind" not in told:
        return read_eagle(told, weights)
    target = dict(told["target"])
    config = AutoConfig.for_model(target.pop("model_type"), **target)
    heads: HeadsModule = new_heads(told["kind"], config, **told["settings"])
    heads.load_state_dict(weights)
    return heads, config


def _weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("it has no weights as safetensors; `paceline convert` writes those of pytorch_model.bin so")
    return {name: weight for file in files for name, weight in load_file(file).items()}
