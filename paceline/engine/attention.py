"""The one attention function that models call, and the arithmetic that every cache layout shares.

Registered with transformers as `paceline_ragged`; a model loaded with that name hands every layer's queries, keys and
values to it, and it hands them to the pass under way. Positions never mix between sequences.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from paceline.engine.kv_cache import Attention
from paceline.errors import ModelNotUsable

ATTENTION_NAME = "paceline_ragged"
FOLDED_QUERIES = 16
"""Up to this many queries, the heads that share a KV head become rows of one product, which reads keys once."""
UNSUPPORTED = {
    "sliding_window": "sliding-window attention",
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias on attention scores",
}


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    packed_attention: Attention,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for the T tokens of a packed row: `query` is [1, H, T, D], `key` and `value` [1, KV heads, T, D].

    Returns [1, T, H, D]. Raises ModelNotUsable when the model asks for a kind of attention that this is not.
    """
    for name, meaning in UNSUPPORTED.items():
        if options.get(name) is not None:
            raise ModelNotUsable(f"the model uses {meaning}, which the engine does not run")
    layer = cast(int, module.layer_idx)
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    attended = packed_attention.attend(layer, query[0], key[0], value[0], scale)
    return attended.transpose(0, 1)[None], None


def causal_mask(query_count: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [query_count, length] for the last queries over all keys."""
    mask = torch.full((query_count, length), float("-inf"), dtype=dtype, device=device)
    return mask.triu(length - query_count + 1)


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of one sequence: `query` [H, q, D], `keys` and `values` [KV heads, length, D], `mask` [q, length].

    Without a mask a single query sees all keys, and several are taken for the whole sequence, plainly causal.
    Returns the H * q * D elements in order.
    """
    is_causal = mask is None and query.shape[1] > 1
    query, keys, values, mask = _grouped(query, keys, values, mask, fold=not is_causal)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of a sequence's keys, to be merged: CPU only. Without `mask` [q, keys] every key is seen.

    Returns the output [KV heads, heads a KV head, q, D] and the log of the softmax sums [KV heads, heads, q].
    """
    shape = (keys.shape[0], -1, *query.shape[1:])
    grouped, keys, values, mask = _grouped(query, keys, values, mask, fold=True)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    output = output.reshape(shape)
    return output, log_sum.reshape(output.shape[:-1])


def merge_parts(outputs: Sequence[torch.Tensor], log_sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join attention over parts of the keys: `outputs` [..., D] and `log_sums` [...] of each (Flash-Decoding).

    A part of which a query sees nothing has a log sum of minus infinity, and so no weight.
    """
    weights = torch.stack(tuple(log_sums)).softmax(0)[..., None]
    parts = torch.stack([output.float() for output in outputs])
    return (weights * parts).sum(0).to(outputs[0].dtype)


def _grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, fold: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bring heads that share a KV head together, without copying keys: four dimensions each, as SDPA takes them.

    For few queries they become query rows of one product, which reads the keys once.
    """
    grouped = query.reshape(keys.shape[0], -1, *query.shape[1:])
    heads, queries = grouped.shape[1:3]
    if fold and queries <= FOLDED_QUERIES:
        folded = grouped.reshape(1, keys.shape[0], heads * queries, -1)
        return folded, keys[None], values[None], None if mask is None else mask.repeat(heads, 1)
    shape = (-1, heads, -1, -1)
    return grouped, keys[:, None].expand(shape), values[:, None].expand(shape), mask


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
