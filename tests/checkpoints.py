"""Tiny random checkpoints of the architectures the engine runs, written once a session."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("Llama", "Qwen3", "Glm4")
VOCABULARY_SIZE = 320
MAX_LENGTH = 512
END_TOKEN_ID = 7
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_model(folder: Path, family: str, *, seed: int = 5, **changes: Any) -> Path:
    """Write a random model of a transformers family; the same seed and shape give the same weights.

    Weights are large for their size, so that the likeliest token stands out and rounding decides nothing.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": MAX_LENGTH,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": END_TOKEN_ID,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**shape | changes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


def write_related_draft(folder: Path, target: Path, family: str, *, noise: float) -> Path:
    """Write the target with noise on its weights: the smaller `noise`, the more often the draft is right."""
    model = getattr(transformers, f"{family}ForCausalLM").from_pretrained(target)
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.save_pretrained(folder)
    return folder


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def edit_config(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", **changes)


def halve(path: Path) -> None:
    """Leave the first half of a file, as a write that was cut off does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
