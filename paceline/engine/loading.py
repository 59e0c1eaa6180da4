"""Loading of a model, with a check that its passes through the engine agree with its own attention."""

from transformers import PreTrainedModel

from paceline.engine.memory import refusing_to_start
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.engine.model.identity import Origin
from paceline.engine.model.loader import DeviceName, DtypeName, made_of, read_module, resolve_device
from paceline.engine.model.model import LoadedModel
from paceline.engine.self_check import check_model, own_logits
from paceline.types import TokenizerFiles


def load_model(model: str, dtype: DtypeName = "auto", device: DeviceName = "auto") -> LoadedModel:
    """Load a directory, a hub id or `builtin:NAME`.

    Raise ModelNotUsable, which says what is wrong with the checkpoint, or StartupError when memory does not hold it.
    """
    checkpoint, place = find_checkpoint(model), resolve_device(device)
    with refusing_to_start(
        f"model {model!r} does not fit the memory of {place}; take a shorter --dtype or another --device"
    ):
        module, origin = read_module(checkpoint, dtype, place)
        return as_loaded(module, model, read_tokenizer(checkpoint), origin)


def as_loaded(
    module: PreTrainedModel, model_id: str, tokenizer: TokenizerFiles | None, origin: Origin | None = None
) -> LoadedModel:
    """Do what `made_of` does, then check it: raise ModelNotUsable when the passes and the module disagree."""
    own = own_logits(module)  # before the module is used up
    loaded = made_of(module, model_id, tokenizer, origin)
    check_model(loaded, own)
    return loaded
