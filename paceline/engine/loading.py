"""Loading of a model, with a check that its passes through the engine agree with its own attention."""

from collections.abc import Callable
from typing import Literal

from transformers import PreTrainedModel

from paceline.engine.backend import find_backend
from paceline.engine.memory import refusing_to_start
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.engine.model.identity import Origin
from paceline.engine.model.loader import (
    DTYPES,
    DeviceName,
    DtypeName,
    convert,
    described,
    made_of,
    read_module,
    resolve_device,
)
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.quantized_layers import quantize_layers
from paceline.engine.model.weight_format import fastest_format, possible_formats
from paceline.engine.quantization import Quantization
from paceline.engine.self_check import check_model, own_logits
from paceline.types import TokenizerFiles

Auto = Literal["auto"]


def load_model(
    model: str, dtype: DtypeName = "auto", device: DeviceName = "auto", quantization: Quantization = "none"
) -> LoadedModel:
    """Load a directory, a hub id or `builtin:NAME`. `auto` is the checkpoint's own dtype.

    Raise ModelNotUsable, which says what is wrong with the checkpoint, or StartupError when memory does not hold it or
    it cannot be quantised.
    """
    return _loaded(model, dtype, device, lambda _: quantization)


def load_fastest(
    model: str, dtype: DtypeName = "auto", device: DeviceName = "auto", quantization: Quantization | Auto = "auto"
) -> LoadedModel:
    """Load as `load_model` does, but `auto` is what is fastest on this machine. For drafts, which affect no output."""

    def choose(module: PreTrainedModel) -> Quantization:
        formats = possible_formats(module, DTYPES.get(dtype), None if quantization == "auto" else quantization)
        chosen = fastest_format(module, formats, find_backend(module.device))
        convert(module, chosen.dtype)
        return chosen.quantization

    return _loaded(model, dtype, device, choose)


def _loaded(
    model: str, dtype: DtypeName, device: DeviceName, choose: Callable[[PreTrainedModel], Quantization]
) -> LoadedModel:
    checkpoint, place = find_checkpoint(model), resolve_device(device)
    with refusing_to_start(
        f"model {model!r} does not fit the memory of {place}; take a shorter --dtype or another --device"
    ):
        module, origin = read_module(checkpoint, dtype, place)
        return as_loaded(module, model, read_tokenizer(checkpoint), origin, choose(module))


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
    if quantization == "int8":
        quantize_layers(module)  # so the passes are compared with the quantised module
    own = own_logits(module)  # before the module is used up
    loaded = made_of(module, description, tokenizer)
    check_model(loaded, own)
    return loaded
