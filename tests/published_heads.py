"""Small random heads in the files of others, with the names that these give to weights and settings.

`drafts_of` says what they draft, by the names in the file and transformers' own layers.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def write_eagle(folder: Path, target: Path, *, has_bias: bool = False, is_pickled: bool = False) -> Path:
    """Write EAGLE's own form: a flat configuration, and a copy of the embeddings beside the rest."""
    config = _told(target)
    size = config["hidden_size"]
    weights = _layer(config, "layers.0.", has_bias=has_bias) | {"fc.weight": _random(size, 2 * size)}
    weights |= {"fc.bias": _random(size)} if has_bias else {}
    weights["embed_tokens.weight"] = _random(config["vocab_size"], size)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    if is_pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def write_speculators(folder: Path, target: Path, *, layernorms: bool) -> Path:
    """Write the form of the library `speculators`: the layer's configuration stands inside."""
    config = _told(target)
    size = config["hidden_size"]
    weights = _layer(config, "transformer.") | {"fusion_fc.weight": _random(size, 2 * size)}
    for name in ("transformer.input_layernorm", "embedding_layernorm", "pre_lm_head_layernorm") if layernorms else ():
        weights[f"{name}.weight"] = 1 + _random(size)
    told = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": config,
        "layernorms": layernorms,
        "fusion_bias": False,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(told))
    save_file(weights, folder / "model.safetensors")
    return folder


def _told(target: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(target)
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "head_dim",
    )
    shared = {name: getattr(config, name) for name in (*names, "vocab_size", "max_position_embeddings")}
    return shared | {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "rope_theta": 10000.0}


def write_eagle3(
    folder: Path, target: Path, *, is_speculators: bool, is_residual_normed: bool = False, is_3_1: bool = False
) -> Path:
    """Write EAGLE-3 in its own form or the library's, with a head for every third of the target's tokens."""
    config = _told(target)
    size, vocabulary_size = config["hidden_size"], config["vocab_size"]
    token_ids = torch.arange(1, vocabulary_size, 3)
    prefix = "layers.0." if is_speculators else "midlayer."
    weights = _layer(config, prefix, read_size=2 * size) | {"fc.weight": _random(size, 3 * size)}
    for name in (f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm"):
        weights[f"{name}.weight"] = 1 + _random(size)
    weights |= {f"fc_norm.{place}.weight": 1 + _random(size) for place in range(3) if is_3_1}
    weights |= {"lm_head.weight": _random(len(token_ids), size), "d2t": token_ids - torch.arange(len(token_ids))}
    weights["t2d"] = torch.isin(torch.arange(vocabulary_size), token_ids)
    folder.mkdir()
    told: dict[str, Any] = config | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(token_ids)}
    if is_speculators:
        told = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": len(token_ids),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
            "norm_before_residual": is_residual_normed,
            "transformer_layer_config": config,
        }
    (folder / "config.json").write_text(json.dumps(told | ({"fc_norm": True, "norm_output": True} if is_3_1 else {})))
    save_file(weights, folder / "model.safetensors")
    return folder


def _random(*size: int) -> Tensor:
    return torch.randn(size) * 0.2


def _layer(
    config: dict[str, Any], prefix: str, *, has_bias: bool = False, read_size: int | None = None
) -> dict[str, Tensor]:
    size, inner, head_size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    counts = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    weights = {
        f"self_attn.{one}_proj.weight": _random(count * head_size, read_size or size) for one, count in counts.items()
    }
    if has_bias:
        weights |= {f"self_attn.{one}_proj.bias": _random(count * head_size) for one, count in counts.items()}
    weights["self_attn.o_proj.weight"] = _random(size, size)
    weights |= {f"mlp.{one}_proj.weight": _random(inner, size) for one in ("gate", "up")}
    weights |= {"mlp.down_proj.weight": _random(size, inner), "post_attention_layernorm.weight": 1 + _random(size)}
    return {prefix + name: weight for name, weight in weights.items()}


@torch.inference_mode()
def drafts_of(folder: Path, target: Path, token_ids: list[int], count: int) -> list[int]:
    """Return the greedy drafts after `token_ids`, the last of which the target's cache does not hold."""
    weights = load_file(folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    body, embed = _body(told, weights), model.get_input_embeddings()
    states = model.model(input_ids=torch.tensor([token_ids[:-1]])).last_hidden_state[0]
    fc = weights["fusion_fc.weight" if "fusion_fc.weight" in weights else "fc.weight"], weights.get("fc.bias")
    drafts: list[int] = []
    while len(drafts) < count:
        embedded = embed(torch.tensor([*token_ids[1:], *drafts]))
        read = torch.cat((_normed(embedded, weights.get("embedding_layernorm.weight")), states), dim=-1)
        made = body(inputs_embeds=nn.functional.linear(read, *fc)[None]).last_hidden_state[0, -1:]
        output = _normed(made, weights.get("pre_lm_head_layernorm.weight"))
        drafts.append(int(model.lm_head(output).argmax()))
        states = torch.cat((states, made))
    return drafts


def _body(told: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """Return transformers' layer with the file's weights, as a model without embeddings and last norm."""
    config = dict(told.get("transformer_layer_config", told))
    prefix = next(name for name in weights if "self_attn" in name).partition("self_attn")[0]
    has_bias = f"{prefix}self_attn.q_proj.bias" in weights
    shape = _shape(config)
    body: Any = Qwen2Model(Qwen2Config(**shape)) if has_bias else LlamaModel(LlamaConfig(**shape))
    body.norm = nn.Identity()
    if f"{prefix}input_layernorm.weight" not in weights:
        body.layers[0].input_layernorm = nn.Identity()
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    body.layers[0].load_state_dict(own)
    return body.eval()


def _normed(values: Tensor, weight: Tensor | None) -> Tensor:
    return values if weight is None else nn.functional.rms_norm(values, weight.shape, weight, 1e-6)


@torch.inference_mode()
def drafts_of_eagle3(folder: Path, target: Path, token_ids: list[int], count: int) -> list[int]:
    """Return the greedy drafts after `token_ids` as `drafts_of` does, of EAGLE-3's heads."""
    weights = load_file(folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    layer_count, embed = model.config.num_hidden_layers, model.get_input_embeddings()
    taps = told.get("eagle_aux_hidden_state_layer_ids", (2, layer_count // 2, layer_count - 3))
    found = model.model(input_ids=torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
    # A tap without a norm of its own, as EAGLE 3.1 has them, is read as it is.
    tapped = [_normed(found[one][0], weights.get(f"fc_norm.{place}.weight")) for place, one in enumerate(taps)]
    states = nn.functional.linear(torch.cat(tapped, dim=-1), weights["fc.weight"])
    drafts: list[int] = []
    while len(drafts) < count:
        made = _after_layer_3(told, weights, embed(torch.tensor([*token_ids[1:], *drafts])), states)[-1:]
        normed = _normed(made, weights["norm.weight"])
        likeliest = int((normed @ weights["lm_head.weight"].T).argmax())
        drafts.append(likeliest + int(weights["d2t"][likeliest]))
        states = torch.cat((states, normed if told.get("norm_output") else made))
    return drafts


def _after_layer_3(told: dict[str, Any], weights: dict[str, Tensor], embedded: Tensor, states: Tensor) -> Tensor:
    """Return what the layer makes of all tokens, with attention written out."""
    config = told.get("transformer_layer_config", told)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    own = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
    normed = _normed(states, own["hidden_norm.weight"])
    read = torch.cat((_normed(embedded, own["input_layernorm.weight"]), normed), dim=-1)
    attention: Any = LlamaModel(LlamaConfig(**_shape(config)))
    turn = attention.rotary_emb(states, torch.arange(len(states))[None])
    query, key, value = (
        (read @ own[f"self_attn.{one}_proj.weight"].T).view(len(states), -1, config["head_dim"]).transpose(0, 1)[None]
        for one in "qkv"
    )
    query, key = apply_rotary_pos_emb(query, key, *turn)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    hidden = normed if told.get("norm_before_residual") else states
    hidden = hidden + attended[0].transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
    entering = _normed(hidden, own["post_attention_layernorm.weight"])
    gate, up = (entering @ own[f"mlp.{one}_proj.weight"].T for one in ("gate", "up"))
    made: Tensor = hidden + (nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return made


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("model_type", "architectures")} | {
        "vocab_size": 1
    }
