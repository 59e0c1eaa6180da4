"""A layer of a plain decoder: attention and feed-forward as torch's operations on the weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.backend import Product
from paceline.engine.interfaces import Attention
from paceline.engine.model.forms import Form
from paceline.engine.model.rotary import Rotation, halves_order


class Layer:
    def __init__(self, layer: Any, number: int, form: Form, turned_size: int, taken: Callable[..., Product]) -> None:
        """Take a module's weights. `turned_size` of a head's numbers turn; `taken` is a form of `linear.take`."""
        attention, feed_forward, config = layer.self_attn, layer.mlp, layer.self_attn.config
        self.number = number
        self.dtype: torch.dtype = attention.o_proj.weight.dtype
        self.head_size: int = attention.head_dim
        self.scaling: float = attention.scaling
        query_count, key_count = config.num_attention_heads, config.num_key_value_heads
        self.counts, self.turned_counts = (query_count + key_count, key_count), (query_count, key_count)
        """Numbers of heads: (queries and keys, values) and (queries, keys)."""
        order = halves_order(self.head_size, turned_size, turns_neighbours=form.turns_neighbours)
        projection, output, gate_and_up, down = products_of(layer)
        self.projection = taken(*projection, order=self._output_order(order))
        self.output, self.gate_and_up, self.down = taken(*output), taken(*gate_and_up), taken(*down)
        self.query_norm, self.key_norm = (_norm_of(attention, name, order) for name in ("q_norm", "k_norm"))
        self.before_attention, self.after_attention, self.before_feed_forward, self.after_feed_forward = (
            _norm_of(layer, name)
            for name in (
                *(form.before_attention, form.after_attention),
                *(form.before_feed_forward, form.after_feed_forward),
            )
        )
        (self.activation,) = _those_of(feed_forward, "act_fn", "activation_fn")

    @property
    def products(self) -> tuple[Product, ...]:
        return self.projection, self.output, self.gate_and_up, self.down

    def _output_order(self, order: torch.Tensor | None) -> torch.Tensor | None:
        """Return the order of all that the projection gives, if the numbers of a query and a key have `order` [D]."""
        if order is None:
            return None
        turned, values = (torch.arange(count * self.head_size).view(count, -1) for count in self.counts)
        return torch.cat((turned[:, order].flatten(), values.flatten() + turned.numel()))

    def __call__(
        self,
        hidden: torch.Tensor,
        turn: Rotation,
        attention: Attention,
        wanted: torch.Tensor | None = None,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Turn [T, hidden size] into the same, or into [W, hidden size] if only tokens `wanted` [W] are read later.

        The attention of a layer that is made for it reads `beside` [T, hidden size] too, before the rest.
        """
        entering = _normed(self.before_attention, hidden)
        if beside is not None:
            entering = torch.cat((beside, entering), dim=1)
        projected = self.projection(entering).view(len(hidden), -1, self.head_size)
        turned, value = projected.split_with_sizes(self.counts, dim=1)
        if self.query_norm and self.key_norm:
            query, key = turned.split_with_sizes(self.turned_counts, dim=1)
            turned = torch.cat((self.query_norm.of_heads(query), self.key_norm.of_heads(key)), dim=1)
        query, key = turn(turned.transpose(0, 1)).to(self.dtype).split_with_sizes(self.turned_counts)
        value = value.transpose(0, 1).to(self.dtype)
        attended = attention.attend(self.number, query, key, value, self.scaling).transpose(0, 1)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        hidden = hidden + _normed(self.after_attention, self.output(attended.flatten(1)))
        gate, up = self.gate_and_up(_normed(self.before_feed_forward, hidden)).chunk(2, dim=-1)
        return hidden + _normed(self.after_feed_forward, self.down(self.activation(gate).mul_(up)))


def products_of(layer: Any) -> tuple[list[Any], ...]:
    """Return the linear layers of a module's layer, those together that become one product."""
    attention, feed_forward = layer.self_attn, layer.mlp
    return (
        _those_of(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
        [attention.o_proj],
        _those_of(feed_forward, "gate_up_proj", "gate_proj", "up_proj"),
        [feed_forward.down_proj],
    )


class Norm:
    """Root mean square norm (Zhang, Sennrich, arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight.to(torch.float32, copy=True)  # see the embedding of `plain_decoder`
        self.epsilon = epsilon

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, self.weight.shape, self.weight, self.epsilon)

    def of_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Norm [T, H, D] head by head, or all heads of a token together if there is a weight for each number."""
        return self(heads.reshape(len(heads), -1, len(self.weight))).view(heads.shape)


def _normed(norm: Norm | None, values: torch.Tensor) -> torch.Tensor:
    return norm(values) if norm else values


def _norm_of(module: Any, name: str | None, order: torch.Tensor | None = None) -> Norm | None:
    """Return the module's norm of this name, if it has one, with its numbers in `order`, which is a head's."""
    norm = name and getattr(module, name, None)
    if not norm:
        return None
    weight = norm.weight.detach()
    if order is not None:
        weight = weight.view(-1, len(order))[:, order].flatten()
    return Norm(weight, norm.variance_epsilon)


def _those_of(module: Any, first: str, *others: str) -> list[Any]:
    """Return the module's part of the first name, or else those of the others, of which it has all."""
    return [getattr(module, first)] if hasattr(module, first) else [getattr(module, name) for name in others]
