"""The shapes of synthetic pairs. This module knows nothing of weights and does not import torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    family: str
    """Family in transformers: `Llama` means LlamaConfig and LlamaForCausalLM."""
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    intermediate_size: int
    vocabulary_size: int
    max_length: int
    rope_theta: float = 10_000.0

    def config_values(self) -> dict[str, Any]:
        """Return the configuration by transformers' names. Without end tokens outputs have the length asked for."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.family == "Glm4":
            rope["partial_rotary_factor"] = 0.5
        return {
            "num_hidden_layers": self.layer_count,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.head_count,
            "num_key_value_heads": self.kv_head_count,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": self.max_length,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


@dataclass(frozen=True)
class PairShape:
    target: ModelShape
    draft: ModelShape
    dtype: str
    """Default dtype of the written weights."""


SHAPES = {
    "100m/5m": PairShape(
        ModelShape("Llama", 12, 768, 12, 4, 64, 2688, 4096, 4096),
        ModelShape("Llama", 4, 256, 4, 2, 64, 704, 4096, 4096),
        "float32",
    ),
    "300m/20m": PairShape(
        ModelShape("Llama", 24, 1024, 16, 4, 64, 3072, 4096, 4096),
        ModelShape("Llama", 8, 384, 6, 2, 64, 1472, 4096, 4096),
        "float32",
    ),
    # lmsys/vicuna-7b-v1.3 and double7/vicuna-68m
    "vicuna-7b/68m": PairShape(
        ModelShape("Llama", 32, 4096, 32, 32, 128, 11008, 32_000, 2048),
        ModelShape("Llama", 2, 768, 12, 12, 64, 3072, 32_000, 2048),
        "bfloat16",
    ),
    # Qwen/Qwen3-8B and Qwen/Qwen3-0.6B
    "qwen3-8b/0.6b": PairShape(
        ModelShape("Qwen3", 36, 4096, 32, 8, 128, 12_288, 151_936, 40_960, 1e6),
        ModelShape("Qwen3", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960, 1e6),
        "bfloat16",
    ),
    # zai-org/GLM-4-9B-0414 and jukofyork/GLM-4.5-DRAFT-0.6B, which is Qwen2.5-0.5B with GLM's vocabulary
    "glm4-9b/0.6b": PairShape(
        ModelShape("Glm4", 40, 4096, 32, 2, 128, 13_696, 151_552, 32_768),
        ModelShape("Qwen2", 24, 896, 14, 2, 64, 4864, 151_552, 32_768, 1e6),
        "bfloat16",
    ),
}
"""The three pairs of arXiv 2510.22876 and two for CPUs. Embeddings and heads are untied in all: a pair that is tied in
the original takes more memory here, but a pass reads the same bytes."""
