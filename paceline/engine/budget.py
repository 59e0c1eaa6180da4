"""The memory that an engine may use: what its cache gets, and of how many places it holds logits at a time.

`--memory` is for all, so the cache gets what process, weights and calls leave; `--kv-memory` is for the cache alone.
"""

from dataclasses import dataclass, replace

from paceline.engine.heads.loading import LoadedHeads
from paceline.engine.interfaces import KvShape
from paceline.engine.memory import check_shares, kv_memory_bytes, shares_of, taken_bytes
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.errors import StartupError
from paceline.planning.memory import MOST_LOGITS, CallSize, WeightForm


@dataclass(frozen=True)
class Budget:
    setting: str
    """The flag that decides, with its value."""
    kv_bytes: int
    logit_count: int
    """Of how many places logits are held at a time; a row's are held together, however many."""


def budget_of(model: LoadedModel, options: EngineOptions, heads: LoadedHeads | None = None) -> Budget:
    """Return the budget of a loaded model. Raise StartupError when `memory` does not hold it."""
    if options.memory is None:
        kv_bytes = kv_memory_bytes(options.kv_memory, model.kv_shape.device)
        logit_count = max(1, MOST_LOGITS // model.description.vocabulary_size)
        return Budget(f"--kv-memory {options.kv_memory}", kv_bytes, logit_count)
    if model.dimensions is None:
        raise StartupError(
            f"--memory is set, and the configuration of {model.description.architecture} lacks the sizes from which "
            "follows what a call takes; give --kv-memory instead"
        )
    call = CallSize.of_rows(options.max_rows, options.prefill_chunk_tokens)
    taken = taken_bytes(model.kv_shape.device)
    shares = shares_of(options.memory, taken, model.dimensions, form_of(model), call)
    check_shares(options.memory, shares, options.page_tokens * cached_shape(model, heads).token_bytes)
    return Budget(f"--memory {options.memory}", shares.kv_bytes, shares.logit_count)


def cached_shape(model: LoadedModel, heads: LoadedHeads | None) -> KvShape:
    """Return the shape of what the cache keeps: the model's layers, and those of heads behind them."""
    layer_count = model.kv_shape.layer_count + (heads.layer_count if heads else 0)
    return replace(model.kv_shape, layer_count=layer_count)


def form_of(model: LoadedModel) -> WeightForm:
    """Return how the model's weights are held."""
    dtype = str(model.kv_shape.dtype).removeprefix("torch.")
    is_int8 = model.description.quantization == "int8"
    return WeightForm(dtype, is_int8, "cpu" if model.kv_shape.device.type == "cpu" else "cuda")
