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
        sharing_count = model.group.sharing_count if model.group else 1
        kv_bytes = kv_memory_bytes(options.kv_memory, model.kv_shape.device, sharing_count)
        logit_count = max(1, MOST_LOGITS // model.description.vocabulary_size)
        return Budget(f"--kv-memory {options.kv_memory}", kv_bytes, logit_count)
    if model.dimensions is None:
        raise StartupError(
            f"--memory is set, and the configuration of {model.description.architecture} lacks the sizes from which "
            "follows what a call takes; give --kv-memory instead"
        )
    _check_bounded(model, options.memory)
    tapped_count = heads.tapped_count if heads else 0
    call = CallSize.of_rows(options.max_rows, options.prefill_chunk_tokens, tapped_count)
    taken = taken_bytes(model.kv_shape.device)
    shares = shares_of(options.memory, taken, model.dimensions, form_of(model), call, options.lanes)
    check_shares(options.memory, shares, options.page_tokens * cached_shape(model, heads).token_bytes)
    return Budget(f"--memory {options.memory}", shares.kv_bytes, shares.logit_count)


def _check_bounded(model: LoadedModel, memory: str) -> None:
    """Raise StartupError when passes on a CPU run torch's operations, which no sum foresees.

    oneDNN keeps what it made for a number of rows, for every number that it met and some of it for ever: the built-in
    target took 1,021 of 704 MiB. Without oneDNN passes of many tokens still take twice what compiled ones do.
    """
    if model.kv_shape.device.type != "cpu" or model.decoder.shares_work:
        return
    told = model.description
    if model.backend.kernels:
        reason, remedy = f"do not run {told.architecture} in {told.dtype}", ""
    else:
        reason, remedy = "are not there", ", or install the package where there is a C++17 compiler"
    raise StartupError(
        f"--memory {memory} cannot be kept without the compiled kernels, which {reason}: torch's operations take "
        f"memory that grows with every new size of a call; give --kv-memory instead, for the cache alone{remedy}"
    )


def cached_shape(model: LoadedModel, heads: LoadedHeads | None) -> KvShape:
    """Return the shape of what the cache keeps: the model's layers, and those of heads behind them."""
    layer_count = model.kv_shape.layer_count + (heads.layer_count if heads else 0)
    return replace(model.kv_shape, layer_count=layer_count)


def form_of(model: LoadedModel) -> WeightForm:
    """Return how the model's weights are held."""
    dtype = str(model.kv_shape.dtype).removeprefix("torch.")
    is_int8 = model.description.quantization in ("int8", "w8a8")
    return WeightForm(dtype, is_int8, "cpu" if model.kv_shape.device.type == "cpu" else "cuda")
