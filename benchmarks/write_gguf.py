"""Write a Llama of ours as a GGUF file, for llama.cpp as a peer: `python -m benchmarks.write_gguf FILE`.

It is the built-in target in float32, unless `--model` and `--dtype` say otherwise. It needs `pip install
'paceline[llama-cpp]'`. For published models llama.cpp has its own converters.
"""

import json
from pathlib import Path
from typing import Any, Literal

import gguf
import torch
from transformers import AutoModelForCausalLM

from benchmarks.commands import run_command
from paceline.builtin import resolve_model
from paceline.files import replacing

LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's weights, ours and GGUF's."""


TYPES = {
    "float32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "bfloat16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
}
"""Types of the file and of its matrices, by dtype. llama.cpp takes norms in float32 only."""

Dtype = Literal["float32", "bfloat16"]


def main(file: Path, model: str = "builtin:target", dtype: Dtype = "float32") -> None:
    with replacing(file) as beside:
        write(beside, model, dtype)


def write(file: Path, name: str, dtype: Dtype) -> None:
    folder = resolve_model(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    file_type, matrix_type = TYPES[dtype]
    writer: Any = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(file_type)
    add_shape(writer, model.config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), model.config)
    add_weights(writer, model.state_dict(), model.config, matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    bpe = tokenizer["model"]
    ids = bpe["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    token_of = {number: token for token, number in ids.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([token_of.get(number, f"<unused {number}>") for number in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    end_token_id = config.vocab_size - 1 if config.eos_token_id is None else config.eos_token_id
    writer.add_eos_token_id(end_token_id)
    writer.add_bos_token_id(end_token_id)  # the tokenizer has none, and llama.cpp wants one
    writer.add_add_bos_token(False)


def add_weights(writer: Any, weights: dict[str, torch.Tensor], config: Any, matrix_type: Any) -> None:
    def add(name: str, weight: torch.Tensor) -> None:
        own = gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else matrix_type
        writer.add_tensor(name, gguf.quants.quantize(weight.contiguous().numpy(), own), raw_dtype=own)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    if not config.tie_word_embeddings:
        add("output.weight", weights["lm_head.weight"])
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for own, name in LAYER_PARTS.items():
            weight = weights[f"model.layers.{layer}.{own}.weight"]
            add(f"blk.{layer}.{name}.weight", _interleaved(weight, heads[name]) if name in heads else weight)


def _interleaved(weight: torch.Tensor, head_count: int) -> torch.Tensor:
    """Put rows in llama.cpp's order, which rotates neighbours together; transformers rotates a head's two halves."""
    return weight.view(head_count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    run_command(main)
