"""A rank's share of a module that our decoder does not know, divided as transformers' tensor-parallel plan says.

A plan names layers by what is divided: their outputs (`colwise`), or their inputs, so that each rank gives a part of a
sum (`rowwise`). transformers adds parts by all-reduce, in an order that depends on where a number stands. Here they are
added in the order of the ranks, so what is strict in one process stays so.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.model.forms import FORMS
from paceline.engine.model.shares import check_even, keep_rows, parameter, widths_of
from paceline.engine.ranks.group import Group
from paceline.errors import StartupError
from paceline.types import RankGrid, RankPlace

OUTPUTS = {"colwise": 1, "packed_colwise": 2}
"""Styles that divide outputs, and how many parts lie one after the other in them, each of which is divided."""
INPUTS = "rowwise"
SUMMED = (INPUTS, "moe_tp_experts")
"""Styles of modules whose outputs are parts of a sum."""
WHOLE = ("colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "replicate")
"""Styles of what every rank works out whole. What a plan divides and gathers again is held whole here."""
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def check_plan(name: str, config: Any, grid: RankGrid) -> None:
    """Raise StartupError unless transformers' plan for this architecture can be followed among so many shares."""
    count = grid.share_count
    if grid.stage_count > 1:
        raise StartupError(
            f"--pipeline-parallel {grid.stage_count} cannot be had of {name}: layers of plain decoders alone are "
            f"divided ({', '.join(FORMS)}); start with --pipeline-parallel 1, and --tensor-parallel for several devices"
        )
    plan = _plan_of(config)
    if not any(style in (*OUTPUTS, INPUTS) for style in plan.values()):
        raise StartupError(
            f"--tensor-parallel {count} cannot be had of {name}: it is no plain decoder ({', '.join(FORMS)}), and "
            "transformers has no tensor-parallel plan that divides its layers; start with --tensor-parallel 1"
        )
    known = {*OUTPUTS, *SUMMED, *WHOLE, *EMBEDDINGS}
    if unknown := [(layer, style) for layer, style in plan.items() if style not in known]:
        layer, style = unknown[0]
        raise StartupError(
            f"--tensor-parallel {count} cannot be had of {name}: transformers' plan divides {layer} by {style!r}, "
            "which the engine does not; start with --tensor-parallel 1"
        )
    if _divides_heads(plan):
        check_even(_heads_of(config), count, "--tensor-parallel", name)


def check_planned_sizes(module: PreTrainedModel, grid: RankGrid) -> None:
    """Raise StartupError unless all that the plan divides has sizes that so many shares divide."""
    sizes: dict[str, int] = {}
    for one in _divided(module):
        # Layers share a name, and one that cannot be divided is enough.
        if one.name not in sizes or one.size % grid.share_count:
            sizes[one.name] = one.size
    check_even(sizes, grid.share_count, "--tensor-parallel", type(module).__name__)


def take_planned_share(module: PreTrainedModel, place: RankPlace) -> None:
    """Leave in a module what its rank holds; its configuration counts the heads of that alone."""
    model: Any = module
    config: Any = module.config
    for one in list(_divided(module)):
        parts, own = one.tensor.detach().chunk(one.part_count, one.axis), place.part(one.size)
        kept = torch.cat([part.narrow(one.axis, own.start, len(own)) for part in parts], one.axis)
        setattr(one.owner, one.attribute, parameter(kept))
    for layer in _summed(module):
        if place.share and getattr(layer, "bias", None) is not None:
            layer.bias = None  # the first share adds it
    keep_rows(model.get_output_embeddings(), torch.tensor(place.part(config.vocab_size)))
    if _divides_heads(_plan_of(config)):
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name, count in _heads_of(config).items():
            setattr(config, name, count // place.grid.share_count)


def join_planned(module: PreTrainedModel, group: Group, vocabulary_size: int) -> None:
    """Have a module of one rank's share work out sums and logits together with the other ranks."""
    model: Any = module
    for layer in _summed(module):
        layer.register_forward_hook(_hook(group.summed))
    widths = widths_of(group.place.grid, vocabulary_size)
    model.get_output_embeddings().register_forward_hook(_hook(lambda part: group.joined(part[0], widths)[None]))


def _hook(together: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a hook that passes on a module's result through `together`, which takes and gives float32."""
    return lambda module, given, result: together(result.float()).to(result.dtype)


@dataclass(frozen=True)
class _Divided:
    """A tensor that is divided along an axis, in which `part_count` parts lie one after the other."""

    name: str
    """As the plan has it: the same for all layers."""
    owner: Any
    attribute: str
    axis: int
    part_count: int

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.attribute)
        return tensor

    @property
    def size(self) -> int:
        """Size of each part."""
        return self.tensor.shape[self.axis] // self.part_count


def _divided(module: PreTrainedModel) -> Iterator[_Divided]:
    plan = _plan_of(module.config)
    for path, owner in module.base_model.named_modules():
        for attribute, tensor in owner.named_parameters(recurse=False):
            name = _general(f"{path}.{attribute}")
            style = plan.get(name) or plan.get(_general(path), "")
            if style in OUTPUTS:
                yield _Divided(name, owner, attribute, max(0, tensor.ndim - 2), OUTPUTS[style])
            elif style == INPUTS and tensor.ndim > 1:
                yield _Divided(name, owner, attribute, tensor.ndim - 1, 1)


def _summed(module: PreTrainedModel) -> list[Any]:
    plan = _plan_of(module.config)
    return [one for path, one in module.base_model.named_modules() if plan.get(_general(path)) in SUMMED]


def _plan_of(config: Any) -> Mapping[str, str]:
    """Return styles by names within the base model; layers' numbers are `*`."""
    return getattr(config, "base_model_tp_plan", None) or {}


def _general(path: str) -> str:
    return _LAYER_NUMBER.sub(".*", path)


def _divides_heads(plan: Mapping[str, str]) -> bool:
    """Return whether outputs of anything within attention, by its name, are divided; else each rank has all heads."""
    return any(style in OUTPUTS and "att" in layer for layer, style in plan.items())


def _heads_of(config: Any) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads")
    return {name: count for name in names if (count := getattr(config, name, None))}
