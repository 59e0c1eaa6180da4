"""Attention over one packed row of many sequences, each reading its own cache.

Registered with transformers as `paceline_ragged`; a model loaded with that name hands every layer's queries, keys and
values to `ragged_attention`. Positions never mix between sequences, so nothing is padded or realigned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from paceline.engine.kv_pool import KvPool

ATTENTION_NAME = "paceline_ragged"


@dataclass(frozen=True)
class Span:
    """Where one sequence's new tokens lie in the packed row."""

    sequence_id: str
    start: int
    stop: int
    mask: torch.Tensor | None
    """Additive, [groups * q, length], or None where none is needed: one new token, or a prefill from 0."""
    is_prefill: bool
    """The new tokens are the whole sequence, so plain causal attention is right."""


@dataclass(frozen=True)
class PackedPass:
    """What attention needs to know of the pass it is part of."""

    pool: KvPool
    spans: Sequence[Span]


def span_mask(
    new_count: int, length: int, group_count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Lower-right causal mask for `new_count` queries over `length` keys, once for each head of a KV head's group."""
    if new_count == 1 or new_count == length:
        return None
    mask = torch.full((new_count, length), float("-inf"), dtype=dtype, device=device).triu(length - new_count + 1)
    return mask.repeat(group_count, 1)


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    packed_pass: PackedPass,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend sequence by sequence.

    For the T tokens of the packed row `query` is [1, H, T, D], `key` and `value` are [1, KV heads, T, D], and the
    result is [1, T, H, D].
    """
    layer = cast(int, module.layer_idx)
    new = torch.stack((key, value))  # [2, 1, KV heads, T, D]
    rows = []
    for span in packed_pass.spans:
        count = span.stop - span.start
        keys, values = packed_pass.pool.write(layer, span.sequence_id, new.narrow(3, span.start, count))
        rows.append(_attend(query.narrow(2, span.start, count), keys, values, span, scaling))
    return torch.cat(rows, dim=2).transpose(1, 2), None


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span, scaling: float) -> torch.Tensor:
    """Attend for one sequence; `query` and the result are [1, H, q, D]."""
    if span.is_prefill:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
    # Heads that share a KV head are folded into the query rows: keys are read once for all of them.
    folded = query.reshape(1, keys.shape[1], -1, query.shape[3])
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=span.mask, scale=scaling)
    return attended.view(query.shape)


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
