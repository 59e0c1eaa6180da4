"""Tiny random checkpoints of the architectures the engine runs, written once a session."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen3", "glm4")
VOCABULARY_SIZE = 320
MAX_LENGTH = 512
END_TOKEN_ID = 7

_KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
}


def write_checkpoint(folder: Path, family: str, *, seed: int, layer_count: int = 2) -> Path:
    """Write a random model; the same seed and shape give the same weights.

    Weights are large for their size, so that the likeliest token stands out and rounding decides nothing.
    """
    config_kind, model_kind = _KINDS[family]
    torch.manual_seed(seed)
    config = config_kind(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        num_hidden_layers=layer_count,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=None,
    )
    model_kind(config).save_pretrained(folder)
    return folder


def write_related_draft(folder: Path, target: Path, family: str, *, noise: float) -> Path:
    """Write the target with noise on its weights: a draft that is right about as often as `noise` is small."""
    model = _KINDS[family][1].from_pretrained(target)
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    model.save_pretrained(folder)
    return folder
