"""The check at load that a model's passes through the engine agree with its own attention.

A model that needs anything the engine lacks, now or in a future transformers, is refused here before a client sees it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.attention.common import ATTENTION_NAME
from paceline.engine.cache.paged import KvPool
from paceline.engine.fixed_shapes import BlockPasses
from paceline.engine.memory import is_out_of_memory
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.experts import mixes_experts, same_experts
from paceline.engine.model.model import LoadedModel
from paceline.engine.passes import FastPasses, Piece
from paceline.errors import ModelNotUsable

LENGTHS = (21, 9)
CACHED_COUNT = 13
"""Tokens of the first sequence in the first pass; the rest runs over the cache, the last token in a pass of its own."""
PAGE_TOKENS = 4
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits over the largest logit: rounding stays far below, wrong attention far above."""


@dataclass(frozen=True)
class OwnLogits:
    """Logits of the model's own attention for the sequences of the check, [length, V] each."""

    chosen: Sequence[torch.Tensor]
    with_same_experts: Sequence[torch.Tensor]
    """The same where no router chooses; none of a model that mixes no experts."""


@torch.inference_mode()
def own_logits(module: PreTrainedModel) -> OwnLogits:
    model: Any = module
    with _refusing(type(module).__name__):
        model.set_attn_implementation("eager")
        try:
            chosen, same = _whole_logits(module), list[torch.Tensor]()
            if mixes_experts(module):
                with same_experts():
                    same = _whole_logits(module)
            return OwnLogits(chosen, same)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)


def _whole_logits(module: PreTrainedModel) -> list[torch.Tensor]:
    model: Any = module
    return [
        model(input_ids=torch.tensor([one], device=module.device), use_cache=False).logits[0].float()
        for one in _sequences(model.config.vocab_size)
    ]


@torch.inference_mode()
def check_model(model: LoadedModel, own: OwnLogits) -> None:
    """Raise ModelNotUsable unless ragged, cached passes agree with the `own_logits`.

    Where near ties may have made routers choose other experts, it is enough that passes agree if none chooses.
    """
    # Where rows are rounded, a number on the edge of two may fall to either, which is as coarse as bfloat16.
    rounds_rows = model.description.rounds_rows
    tolerance = TOLERANCES[torch.bfloat16 if rounds_rows else model.kv_shape.dtype]
    difference = _difference(model, own.chosen)
    if not difference <= tolerance and own.with_same_experts:
        with same_experts():
            difference = _difference(model, own.with_same_experts)
    if not difference <= tolerance:
        raise ModelNotUsable(
            f"{model.description.architecture} gives other logits through the engine than by itself "
            f"(off by {difference:.2g} of the largest); its attention is of a kind that the engine does not run"
            + (
                ""
                if not rounds_rows
                else ", or its rows lose too much when they are rounded: try --dtype float32, or "
                "--quantization int8 or none"
            )
        )


def _difference(model: LoadedModel, own: Sequence[torch.Tensor]) -> float:
    """Return how far logits of ragged, cached passes are off the model's own, of the largest."""
    sequences = _sequences(model.description.vocabulary_size)
    with _refusing(model.description.architecture):
        ways = [FastPasses, BlockPasses] if model.backend.tables and not model.group else [FastPasses]
        found = []
        for one in _as_it_may_run(model):
            found += [_ragged_logits(one, sequences, way) for way in ways]
    differences = [
        (one - other.to(one.device)).abs().max() / one.abs().max()
        for ragged in found
        for one, other in zip(own, ragged, strict=True)
    ]
    return float(torch.stack(differences).max())  # which is no number if any of them is none


def _as_it_may_run(model: LoadedModel) -> list[LoadedModel]:
    """Return the model as it runs and, if it may run without compiled operations too, as it runs then."""
    decoder = model.decoder
    return [model, replace(model, decoder=decoder.plain)] if isinstance(decoder, CompiledDecoder) else [model]


@contextmanager
def _refusing(architecture: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch's, Triton's and Python's own
        if is_out_of_memory(error):
            raise
        raise ModelNotUsable(
            f"{architecture} cannot run through the engine: {type(error).__name__}: {error}"
        ) from error


def _sequences(vocabulary_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary_size, (length,), generator=generator).tolist() for length in LENGTHS]


def _ragged_logits(model: LoadedModel, sequences: Sequence[list[int]], way: type[FastPasses]) -> list[torch.Tensor]:
    """Return all logits of both sequences: both packed in a first pass, the rest of the first one in two more."""
    token_count = sum(map(len, sequences))
    capacity_bytes = 2 * token_count * model.kv_shape.token_bytes
    attention = model.backend.attention
    pool = KvPool(model.kv_shape, capacity_bytes, page_tokens=PAGE_TOKENS, attention=attention, lay_out=model.lay_out)
    passes = way(model, pool)
    last = len(sequences[0]) - 1
    pieces = [(0, 0, CACHED_COUNT), (1, 0, len(sequences[1])), (0, CACHED_COUNT, last), (0, last, last + 1)]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for batch in (pieces[:2], pieces[2:3], pieces[3:]):
        group = []
        for index, start, stop in batch:
            pool.keep(str(index), start, ())
            pool.append(str(index), sequences[index][start:stop])
            group.append(Piece(str(index), start, tuple(sequences[index][start:stop]), stop - start))
        for (index, _, _), part in zip(batch, passes.run(group), strict=True):
            logits[index].append(part.float())
    return [torch.cat(parts) for parts in logits]
