"""A plain decoder that runs torch's operations on the weights, without the modules between. Float32 only.

On a CPU, calling the modules of a small model takes longer than the arithmetic: two thirds of a verify pass of six
tokens through the built-in target.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline.engine.interfaces import Attention
from paceline.engine.model.checkpoint import max_length_of
from paceline.engine.model.linear import least_packed_bytes, take

PLAIN_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Architectures with pre-norm, rotary positions and gated feed-forward, with or without biases and query/key norms."""


class PlainDecoder:
    def __init__(self, module: PreTrainedModel) -> None:
        model: Any = module
        packed_bytes = least_packed_bytes(module)  # before the layers lose their weights
        self.embedding = model.get_input_embeddings().weight
        self.turns = Turns(model.model.rotary_emb, self.embedding, max_length_of(model.config))
        self.layers = [Layer(layer, number, packed_bytes) for number, layer in enumerate(model.model.layers)]
        self.norm = Norm(model.model.norm)
        self.head = take(model.get_output_embeddings(), packed_bytes=packed_bytes)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        hidden = F.embedding(token_ids[0], self.embedding)
        turn = self.turns.at(positions[0])
        for layer in self.layers[:-1]:
            hidden = layer(hidden, turn, attention)
        # For a prompt's other tokens the last layer only has to store keys and values.
        hidden = self.layers[-1](hidden, turn, attention, wanted)
        return self.head(self.norm(hidden))


class Turns:
    """The model's rotary embedding at every position: cosines and signed sines, [max_length, D] each."""

    def __init__(self, embedding: Any, like: torch.Tensor, max_length: int) -> None:
        """`embedding` is called once; `like` has the dtype and device to compute with."""
        cos, sin = embedding(like, torch.arange(max_length, device=like.device)[None])
        half = cos.shape[-1] // 2
        self.cos = cos[0].contiguous()
        # The sines carry the sign of the half that is turned backwards.
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """Return the rotation of positions [T]."""
        return Rotation(self.cos[positions], self.sin[positions])


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding at T positions (Su et al., arXiv 2104.09864), the halves of a head turned against each other."""

    cos: torch.Tensor
    """[T, D]"""
    signed_sin: torch.Tensor
    """[T, D]"""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn [H, T, D]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.signed_sin)


class Layer:
    def __init__(self, layer: Any, number: int, packed_bytes: int) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self.number = number
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query_count, key_count, value_count = (one.out_features // self.head_size for one in projections)
        self.counts, self.turned_counts = (query_count + key_count, value_count), (query_count, key_count)
        """Numbers of heads: (queries and keys, values) and (queries, keys)."""
        taken = partial(take, packed_bytes=packed_bytes)
        self.projection, self.output = taken(*projections), taken(attention.o_proj)
        self.gate_and_up, self.down = taken(feed_forward.gate_proj, feed_forward.up_proj), taken(feed_forward.down_proj)
        self.query_norm, self.key_norm = (
            Norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )
        self.activation = feed_forward.act_fn
        self.attention_norm = Norm(layer.input_layernorm)
        self.feed_forward_norm = Norm(layer.post_attention_layernorm)

    def __call__(
        self, hidden: torch.Tensor, turn: Rotation, attention: Attention, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Turn [T, hidden size] into the same, or into [W, hidden size] if only tokens `wanted` [W] are read later."""
        projected = self.projection(self.attention_norm(hidden)).view(hidden.shape[0], -1, self.head_size)
        turned, value = (heads.transpose(0, 1) for heads in projected.split_with_sizes(self.counts, dim=1))
        if self.query_norm and self.key_norm:
            query, key = turned.split_with_sizes(self.turned_counts)
            turned = torch.cat((self.query_norm(query), self.key_norm(key)))
        query, key = turn(turned).split_with_sizes(self.turned_counts)
        attended = attention.attend(self.number, query, key, value, self.scaling)
        attended = attended.transpose(0, 1)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        hidden = hidden + self.output(attended.flatten(1))
        normed = self.feed_forward_norm(hidden)
        gate, up = self.gate_and_up(normed).chunk(2, dim=-1)
        return hidden + self.down(self.activation(gate).mul_(up))


class Norm:
    """Root mean square norm (Zhang, Sennrich, arXiv 1910.07467)."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight
        self.epsilon: float = norm.variance_epsilon

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, self.weight.shape, self.weight, self.epsilon)
