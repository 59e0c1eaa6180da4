"""How a packed row goes through a model: by the model's own modules, or straight through their weights.

On a CPU the modules of a small model spend more time on being called than on arithmetic: of a verify pass of six tokens
through the built-in target, two thirds. For architectures that are known to be the same plain decoder, the second way
calls the same operations on the same weights without the modules between. Which one is right is seen at load:
`self_check` compares with the model's own forward.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from paceline.engine.checkpoint import max_length_of
from paceline.engine.kv_cache import Attention
from paceline.engine.linear import pack_layers, take

PLAIN_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Pre-norm, rotary positions, gated feed-forward; with or without biases and norms of queries and keys."""


class Decoder(Protocol):
    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run one packed row: `token_ids` and `positions` [1, T], `wanted` [W] indices into T. Returns [W, V]."""
        ...


def make_decoder(module: PreTrainedModel) -> Decoder:
    """The module is used up: a plain decoder takes its weights."""
    if type(module).__name__ in PLAIN_DECODERS and module.dtype == torch.float32:
        return PlainDecoder(module)
    pack_layers(module)
    return ModuleDecoder(module)


@dataclass(frozen=True)
class ModuleDecoder:
    """The model's own forward, whose attention is the engine's."""

    module: PreTrainedModel

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        output = self.module(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            packed_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


class PlainDecoder:
    """The weights of a plain decoder in float32, and what is done with them."""

    def __init__(self, module: PreTrainedModel) -> None:
        model: Any = module
        self._embedding = model.get_input_embeddings().weight
        self._turns = _Turns(model.model.rotary_emb, self._embedding, max_length_of(model.config))
        self._layers = [_Layer(layer, number) for number, layer in enumerate(model.model.layers)]
        self._norm = _Norm(model.model.norm)
        self._head = take(model.get_output_embeddings())

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        hidden = F.embedding(token_ids[0], self._embedding)
        turn = self._turns.at(positions[0])
        for layer in self._layers[:-1]:
            hidden = layer(hidden, turn, attention)
        # Of a prompt's other tokens the last layer gives keys and values, and nobody reads what else it would make.
        hidden = self._layers[-1](hidden, turn, attention, wanted)
        return self._head(self._norm(hidden))


class _Turns:
    """What the model's rotary embedding gives for every position there is, [max_length, D] twice."""

    def __init__(self, embedding: Any, like: torch.Tensor, max_length: int) -> None:
        """`embedding` is asked once; `like` is of the type and device to compute with."""
        cos, sin = embedding(like, torch.arange(max_length, device=like.device)[None])
        half = cos.shape[-1] // 2
        self._cos = cos[0]
        # The half that is turned backwards has its sign here.
        self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def at(self, positions: torch.Tensor) -> "_Rotation":
        """Of positions [T]."""
        return _Rotation(self._cos[positions], self._sin[positions])


@dataclass(frozen=True)
class _Rotation:
    """Rotary embedding at T positions (Su et al., arXiv 2104.09864), the halves of a head turned against each other."""

    cos: torch.Tensor
    """[T, D]"""
    signed_sin: torch.Tensor
    """[T, D]"""

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn [H, T, D]."""
        return torch.addcmul(heads * self.cos, heads.roll(heads.shape[-1] // 2, -1), self.signed_sin)


class _Layer:
    def __init__(self, layer: Any, number: int) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self._number = number
        self._head_size: int = attention.head_dim
        self._scaling: float = attention.scaling
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query_count, key_count, value_count = (one.out_features // self._head_size for one in projections)
        self._counts, self._turned_counts = (query_count + key_count, value_count), (query_count, key_count)
        """Heads: of queries and keys together and of values; of queries and of keys."""
        self._projection, self._output = take(*projections), take(attention.o_proj)
        self._query_norm, self._key_norm = (
            _Norm(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        )
        self._gate_and_up, self._down = take(feed_forward.gate_proj, feed_forward.up_proj), take(feed_forward.down_proj)
        self._activation = feed_forward.act_fn
        self._attention_norm = _Norm(layer.input_layernorm)
        self._feed_forward_norm = _Norm(layer.post_attention_layernorm)

    def __call__(
        self, hidden: torch.Tensor, turn: _Rotation, attention: Attention, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, hidden size] to the same, or to [W, hidden size] where only tokens `wanted` [W] are read afterwards."""
        projected = self._projection(self._attention_norm(hidden)).view(hidden.shape[0], -1, self._head_size)
        turned, value = (heads.transpose(0, 1) for heads in projected.split_with_sizes(self._counts, dim=1))
        if self._query_norm and self._key_norm:
            query, key = turned.split_with_sizes(self._turned_counts)
            turned = torch.cat((self._query_norm(query), self._key_norm(key)))
        query, key = turn(turned).split_with_sizes(self._turned_counts)
        attended = attention.attend(self._number, query, key, value, self._scaling)
        attended = attended.transpose(0, 1)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        hidden = hidden + self._output(attended.flatten(1))
        normed = self._feed_forward_norm(hidden)
        gate, up = self._gate_and_up(normed).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate).mul_(up))


class _Norm:
    """Root mean square norm (Zhang, Sennrich, arXiv 1910.07467)."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._epsilon: float = norm.variance_epsilon

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, self._weight.shape, self._weight, self._epsilon)
