"""A rank's share of a plain decoder's module: some of its layers, and some heads and feed-forward columns of each.

A product whose outputs are divided (queries, keys, values, gate, up, the head) needs nothing of other ranks; one whose
inputs are (output, down) gives a part of a sum. Shoeybi et al., arXiv 1909.08053.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.backend import Product
from paceline.engine.model.plain_layer import products_of
from paceline.engine.quantization import QuantizedWeight
from paceline.engine.ranks.group import Group
from paceline.engine.scratch import Memory, new_memory
from paceline.errors import StartupError
from paceline.types import RankGrid, RankPlace


def check_divisible(name: str, config: Any, grid: RankGrid) -> None:
    """Raise StartupError unless a plain decoder of this class and configuration can be divided so."""
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    divided = heads | {"intermediate_size": config.intermediate_size}
    check_even(divided, grid.share_count, "--tensor-parallel", name)
    check_even({"num_hidden_layers": config.num_hidden_layers}, grid.stage_count, "--pipeline-parallel", name)


def check_even(sizes: Mapping[str, int], count: int, flag: str, name: str) -> None:
    """Raise StartupError unless `count`, the value of a flag, divides all sizes of a module of this class."""
    if wrong := [f"{field} {size}" for field, size in sizes.items() if size % count]:
        fitting = [one for one in range(1, min(sizes.values()) + 1) if not any(v % one for v in sizes.values())]
        raise StartupError(
            f"{flag} {count} does not divide {', '.join(wrong)} of {name}; take {', '.join(map(str, fitting))}"
        )


def check_norms(module: PreTrainedModel, grid: RankGrid) -> None:
    """Raise StartupError when norms of a plain decoder go over heads of several shares."""
    model: Any = module
    attention = model.model.layers[0].self_attn
    norm = getattr(attention, "q_norm", None)
    if grid.share_count > 1 and norm and len(norm.weight) != attention.head_dim:
        raise StartupError(
            f"--tensor-parallel {grid.share_count} cannot be had of {type(module).__name__}: its norms go over all "
            "heads of a token; start with --tensor-parallel 1, and --pipeline-parallel for several devices"
        )


def take_share(module: PreTrainedModel, place: RankPlace) -> None:
    """Leave in a divisible module what its rank holds; its configuration counts that alone."""
    model: Any = module
    config: Any = module.config
    own = place.layers(len(model.model.layers))
    model.model.layers = torch.nn.ModuleList(model.model.layers[own.start : own.stop])
    for layer in model.model.layers:
        _take_layer(layer, config, place)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if place.stage:
        # Tokens enter and logits leave at the first stage. One row keeps dtype and size.
        embedding.weight = parameter(embedding.weight[:1].clone())
        keep_rows(head, torch.arange(1))
    else:
        keep_rows(head, torch.arange(config.vocab_size)[_slice(place.part(config.vocab_size))])
    config.head_dim = model.model.layers[0].self_attn.head_dim
    config.num_hidden_layers = len(own)
    config.num_attention_heads //= place.grid.share_count
    config.num_key_value_heads //= place.grid.share_count


def _take_layer(layer: Any, config: Any, place: RankPlace) -> None:
    head_size = layer.self_attn.head_dim
    queries, keys = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    projection, (output,), gate_and_up, (down,) = products_of(layer)
    _keep_parts(projection, (queries, keys, keys), place)
    _keep_parts(gate_and_up, (config.intermediate_size,) * 2, place)
    for one, size in ((output, queries), (down, config.intermediate_size)):
        _keep_columns(one, _slice(place.part(size)))
        if one.bias is not None and place.share:
            one.bias = None  # the first share adds it


def _keep_parts(layers: Sequence[Any], sizes: Sequence[int], place: RankPlace) -> None:
    """Keep this share of each part of the outputs, whether the parts are layers or lie side by side in one."""
    parts = [torch.arange(size)[_slice(place.part(size))] for size in sizes]
    if len(layers) > 1:
        for layer, part in zip(layers, parts, strict=True):
            keep_rows(layer, part)
        return
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    keep_rows(layers[0], torch.cat([start + part for start, part in zip(starts, parts, strict=True)]))


def keep_rows(layer: Any, rows: torch.Tensor) -> None:
    layer.weight = parameter(layer.weight[rows])
    if layer.bias is not None:
        layer.bias = parameter(layer.bias[rows])


def _keep_columns(layer: Any, columns: slice) -> None:
    weight = layer.weight
    if isinstance(weight, QuantizedWeight):
        layer.weight = replace(weight, numbers=weight.numbers[:, columns].contiguous())
    else:
        layer.weight = parameter(weight[:, columns].contiguous())


def parameter(values: Any) -> Any:
    """Return values as a module holds them."""
    return torch.nn.Parameter(values, requires_grad=False) if isinstance(values, torch.Tensor) else values


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def widths_of(grid: RankGrid, size: int) -> list[int]:
    """Return how many of so many rows or columns each share has."""
    return [len(RankPlace(share, grid).part(size)) for share in range(grid.share_count)]


class SummedProduct:
    """A product of this rank's inputs, added up over the ranks of its stage."""

    def __init__(self, product: Product, group: Group) -> None:
        self._product = product
        self._group = group

    @property
    def way(self) -> str:
        return self._product.way

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        return self._group.summed(self._product(values, memory))


class JoinedProduct:
    """A product of this rank's outputs, whose stage's first rank gets all of them: [T, N] there."""

    def __init__(self, product: Product, group: Group, size: int) -> None:
        """`size` is the number of all outputs."""
        self._product = product
        self._group = group
        self._widths = widths_of(group.place.grid, size)

    @property
    def way(self) -> str:
        return self._product.way

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        return self._group.joined(self._product(values, memory), self._widths)
