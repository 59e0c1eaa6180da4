"""The tensors of one model of a synthetic pair, one at a time.

Every matrix except embedding and head is random and has the size of the shape. The factor scales what each layer adds
to the residual stream: the output projections, and the norms after them in families that have those. It is divided by
the root of the number of layers, so that the sum of all additions has about the same length at any depth.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from paceline.measure.synthetic.seeds import generator
from paceline.measure.synthetic.shapes import ModelShape
from paceline.measure.synthetic.successors import Role, Successors

ADDITIONS = ("o_proj.weight", "down_proj.weight", "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
"""Tensors that the factor scales. The norms are those of GLM-4, where they undo the scale of the projections."""
QUERIES = ("q_proj.weight", "q_norm.weight")
QUERY_SCALE = 8.0
"""Factor that makes attention look at few tokens. The average of all tokens would not tell one text from another."""


def make_config(shape: ModelShape, **extra: Any) -> Any:
    """Return the transformers configuration of a shape, with the `extra` fields."""
    config: Any = getattr(transformers, f"{shape.family}Config")(**shape.config_values(), **extra)
    config.architectures = [f"{shape.family}ForCausalLM"]
    return config


def empty_module(shape: ModelShape) -> Any:
    """Return the model without memory for its weights."""
    with torch.device("meta"):
        return getattr(transformers, f"{shape.family}ForCausalLM")(make_config(shape))


def tensor_sizes(shape: ModelShape) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in empty_module(shape).named_parameters()}


def parameter_count(shape: ModelShape) -> int:
    return sum(size.numel() for size in tensor_sizes(shape).values())


@dataclass(frozen=True)
class Recipe:
    """All that the tensors of a model depend on."""

    role: Role
    shape: ModelShape
    successors: Successors
    factor: float
    dtype: torch.dtype = torch.float32


def make_tensor(name: str, size: torch.Size, recipe: Recipe) -> torch.Tensor:
    """Make one tensor of the model; the same recipe gives the same values."""
    successors = recipe.successors
    if name == "model.embed_tokens.weight":
        return successors.embedding(recipe.role, size, recipe.dtype)
    if name == "lm_head.weight":
        return successors.head(recipe.role, size, recipe.dtype)
    if name.endswith(".bias"):
        return torch.zeros(size, dtype=recipe.dtype)
    scale = recipe.factor / math.sqrt(2 * recipe.shape.layer_count) if name.endswith(ADDITIONS) else 1.0
    if name.endswith(QUERIES):
        scale *= QUERY_SCALE
    if len(size) == 1:
        return torch.full(size, scale, dtype=recipe.dtype)
    noise = torch.randn(size, generator=generator(successors.seed, recipe.role, name))
    return noise.mul_(scale / math.sqrt(size[1])).to(recipe.dtype)


def make_module(recipe: Recipe) -> Any:
    """Return the whole model in memory."""
    config = make_config(recipe.shape)
    module: Any = getattr(transformers, f"{recipe.shape.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(make_tensor(name, parameter.shape, recipe))
    return module


def scale_additions(module: Any, ratio: float) -> None:
    """Multiply the factor of a model in memory by `ratio`."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(ADDITIONS):
                parameter.mul_(ratio)
