"""The choice of numerics: what `auto` becomes, and what cannot be strict. See docs/numerics.md."""

from typing import Literal

import structlog
import torch

from paceline.engine.model.identity import kernels_of
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.errors import StartupError

log = structlog.get_logger()


def resolved_numerics(model: LoadedModel, options: EngineOptions) -> Literal["fast", "strict"]:
    """Resolve `auto`: fast in float32, where fast output equals Hugging Face's already, and strict in half precision.

    Strict too where rows are rounded to int8, for a number on the edge of two may fall to either.

    Raise StartupError when strict numerics are asked for with a dense layout that cannot be strict. Raise it too for
    a mixture of experts that would be strict: in half precision it needs `fast` by name.
    """
    dtype = model.description.dtype
    is_precise = model.kv_shape.dtype == torch.float32 and not model.description.rounds_rows
    if options.numerics == "fast" or (options.numerics == "auto" and is_precise):
        return "fast"
    if model.mixes_experts:
        why = "strict" if options.numerics == "strict" else f"{options.numerics}, which is strict in {dtype},"
        raise StartupError(
            f"--numerics {why} cannot be had of {model.description.architecture}: each expert of a mixture computes "
            "the tokens it is given in one product, so logits depend on the other rows of a pass; start with "
            "--numerics fast, and outputs may differ from plain decoding, or with --dtype float32 --numerics fast"
        )
    if options.layout == "paged" or model.decoder.is_row_independent(options.layout):
        return "strict"
    why = "here results in the dense layout depend on the rectangle's width, and so on its longest row"
    if options.numerics == "strict":
        raise StartupError(
            f"--numerics strict cannot be had with --layout dense: {why}; take --layout paged, or on a CPU "
            "--dtype bfloat16 or float32 with the compiled kernels"
        )
    log.info("numerics are fast", why=why)
    return "fast"


def check_ranks(model: LoadedModel, options: EngineOptions) -> None:
    """Raise StartupError in a rank with other numerics than the first or, where bits count, with other kernels.

    They count where numerics are strict, for a replica's identity names the kernels of its first rank alone. They do
    where ranks choose experts too: each chooses by itself, and the parts of a sum must be of the same expert. All ranks
    call it, once they have loaded.
    """
    if model.group:
        numerics = resolved_numerics(model, options)
        bits_count = numerics == "strict" or model.mixes_experts
        kernels = kernels_of(model, options.layout, fixed_shapes=False) if bits_count else ""
        model.group.check_alike({"numerics": numerics, "processor and kernels": kernels})
