"""Loading of a model, with a check that its passes through the engine agree with its own attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
import transformers
from transformers import PreTrainedModel

from paceline import __version__
from paceline.engine.backend import find_backend
from paceline.engine.compute import memory_of
from paceline.engine.memory import give_back_to, refusing_to_start
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.engine.model.forms import FORMS
from paceline.engine.model.identity import Origin
from paceline.engine.model.loader import (
    DTYPES,
    architecture_of,
    convert,
    described,
    made_of,
    rank_device,
    read_module,
    resolve_device,
)
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.planned_shares import check_plan, check_planned_sizes
from paceline.engine.model.quantized_layers import quantize_layers
from paceline.engine.model.shares import check_divisible, check_norms
from paceline.engine.model.weight_format import fastest_format, possible_formats
from paceline.engine.numerics import check_ranks
from paceline.engine.options import EngineOptions
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.links import Links
from paceline.engine.self_check import check_model, own_logits
from paceline.errors import ModelNotUsable, StartupError
from paceline.types import Device, Dtype, ModelDescription, Quantization, RankGrid, RankPlace, TokenizerFiles

Auto = Literal["auto"]


def load_model(
    model: str, dtype: Dtype = "auto", device: Device = "auto", quantization: Quantization = "none"
) -> LoadedModel:
    """Load a directory, a hub id or `builtin:NAME`. `auto` is the checkpoint's own dtype.

    Raise ModelNotUsable, which says what is wrong with the checkpoint, or StartupError when memory does not hold it or
    it cannot be quantised.
    """
    return _loaded(model, dtype, device, lambda _: quantization)


def load_fastest(
    model: str, dtype: Dtype = "auto", device: Device = "auto", quantization: Quantization | Auto = "auto"
) -> LoadedModel:
    """Load as `load_model` does, but `auto` is what is fastest on this machine. For drafts, which affect no output."""

    def choose(module: PreTrainedModel) -> Quantization:
        formats = possible_formats(module, DTYPES.get(dtype), None if quantization == "auto" else quantization)
        chosen = fastest_format(module, formats, find_backend(module.device))
        convert(module, chosen.dtype)
        return chosen.quantization

    return _loaded(model, dtype, device, choose)


def _loaded(model: str, dtype: Dtype, device: Device, choose: Callable[[PreTrainedModel], Quantization]) -> LoadedModel:
    checkpoint, place = find_checkpoint(model), resolve_device(device)
    with refusing_to_start(
        f"model {model!r} does not fit the memory of {place}; take a shorter --dtype or another --device"
    ):
        module, origin = read_module(checkpoint, dtype, place)
        return as_loaded(module, model, read_tokenizer(checkpoint), origin, choose(module))


def load_share(
    model: str,
    dtype: Dtype,
    device: Device,
    quantization: Quantization | Auto,
    options: EngineOptions,
    place: RankPlace,
    meet: Callable[[bool], Links],
) -> LoadedModel:
    """Load a rank's share as `load_model` loads a model. `meet` links ranks, on GPUs or not, when this one has read.

    The weights are read on the host: each rank needs memory for its share alone on its device. The first rank checks
    the passes of all, so the others have to follow it by then. Raise ModelNotUsable or StartupError.
    """
    checkpoint, device_here = find_checkpoint(model), rank_device(device, place)
    name = architecture_of(checkpoint)
    is_plain = name in FORMS
    (check_divisible if is_plain else check_plan)(name, checkpoint.config, place.grid)
    on_gpu, is_quantized = device_here.type == "cuda", quantization == "int8"
    if quantization == "w8a8":
        raise StartupError("--quantization w8a8 cannot be had of ranks; start with --quantization int8 or none")
    if is_quantized and on_gpu:
        raise StartupError("--quantization int8 cannot be had of ranks on GPUs; start with --quantization none")
    with refusing_to_start(f"the share of model {model!r} does not fit the memory of {device_here}; take more ranks"):
        module, origin = read_module(checkpoint, dtype, "cpu")
        (check_norms if is_plain else check_planned_sizes)(module, place.grid)
        tokenizer = read_tokenizer(checkpoint)
        described_here = described(module, model, tokenizer, origin, "int8" if is_quantized else "none")
        if is_quantized:
            quantize_layers(module, "int8")
        own = None if place.rank else own_logits(module)
        group = Group(place, meet(on_gpu), device_here)
        group.check_alike(_facts(described_here, place.grid))
        loaded = made_of(module, replace(described_here, device=str(device_here)), tokenizer, group)
        group.meet()
        check_ranks(loaded, options)
        # All have loaded by then, and keep nothing more, so that what is free is what the weights of all leave.
        give_back_to(device_here)
        group.share_memory(memory_of(device_here))
        if own:
            with nullcontext() if is_plain else _blaming_plan(place.grid):
                check_model(loaded, own)
        return loaded


@contextmanager
def _blaming_plan(grid: RankGrid) -> Iterator[None]:
    """Add to a refusal what the model may be started with: what the check found may be the division's fault."""
    try:
        yield
    except ModelNotUsable as error:
        raise ModelNotUsable(
            f"divided as transformers' plan says, {error.message}; start with --tensor-parallel 1 in place of "
            f"{grid.share_count}"
        ) from error


def _facts(description: ModelDescription, grid: RankGrid) -> dict[str, str]:
    """Return what all ranks of a model must have in common, by names for people."""
    return {
        "weights": description.weights_digest,
        "configuration": description.configuration_digest,
        "dtype": description.dtype,
        "quantization": description.quantization,
        "numbers of ranks": str(grid),
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "version of Paceline": __version__,
    }


def as_loaded(
    module: PreTrainedModel,
    model_id: str,
    tokenizer: TokenizerFiles | None,
    origin: Origin | None = None,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Quantise a module, make of it what runs, and check that: raise ModelNotUsable when it and the module disagree.

    `origin` is None for a module that was not read from files.
    """
    description = described(module, model_id, tokenizer, origin, quantization)
    if quantization != "none":
        quantize_layers(module, quantization)  # so the passes are compared with the quantised module
    own = own_logits(module)  # before the module is used up
    loaded = made_of(module, description, tokenizer)
    check_model(loaded, own)
    return loaded
