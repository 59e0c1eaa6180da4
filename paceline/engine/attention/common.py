"""The one attention function that models call, and the arithmetic that every cache layout shares.

Registered with transformers as `paceline_ragged`; a model loaded with that name hands every layer's queries, keys and
values to it, and it hands them to the pass under way. Positions never mix between sequences.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from paceline.engine.interfaces import Attention, Span
from paceline.errors import ModelNotUsable

ATTENTION_NAME = "paceline_ragged"
FOLDED_QUERIES = 16
"""Up to this many queries, the heads that share a KV head become rows of one product, which reads keys once."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Stores keys and values of a layer and attends: `Attention.attend` for one layer."""
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


class Shield:
    """Keeps a token whose key or value is not finite from the queries before it, in a pass on a CPU.

    A product with a weight of 0 does not hide an infinity, and what reaches an earlier token is cached with it, and
    perhaps shared. Looking for one costs two sums a layer, where any query has tokens after it.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans = spans
        # On other devices the host would have to wait for the sums.
        self._looks = device.type == "cpu" and any(span.count > 1 for span in spans)

    def attend(self, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return what `attend` makes of them, [H, T, D] each, with every query as if later tokens were finite.

        That is so up to the row's first such token; those that see it may be told of later ones too.
        """
        if not self._looks or isfinite(key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32)):
            return attend(query, key, value)
        wrong = ~(key.isfinite().all(2).all(0) & value.isfinite().all(2).all(0))
        late = torch.zeros_like(wrong)
        for span in self._spans:
            late[span.start : span.stop] = wrong[span.start : span.stop].cumsum(0) > 0
        early = attend(query, *(one.masked_fill(wrong[:, None], 0) for one in (key, value)))
        # Last, for the cache keeps what is stored last.
        return torch.where(late[:, None], attend(query, key, value), early)


def causal_mask(query_count: int, length: int, group_size: int, like: torch.Tensor) -> torch.Tensor:
    """Additive mask for the last queries over all keys, of the type and device of `like`.

    [query_count, length]; for few queries [group_size * query_count, length], once for each head of a group, as such
    queries are folded below.
    """
    mask = torch.full((query_count, length), float("-inf"), dtype=like.dtype, device=like.device)
    mask = mask.triu(length - query_count + 1)
    return mask.repeat(group_size, 1) if query_count <= FOLDED_QUERIES else mask


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of one sequence: `query` [H, q, D], `keys` and `values` [KV heads, length, D], `mask` as made above.

    Without a mask a single query sees all keys, and several are taken for the whole sequence, plainly causal.
    Returns the H * q * D elements in order.
    """
    is_causal = mask is None and query.shape[1] > 1
    query, keys, values = _grouped(query, keys, values, fold=not is_causal and query.shape[1] <= FOLDED_QUERIES)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of a sequence's keys, to be merged: CPU only. Without `mask` every key is seen.

    Returns the output [H, q, D] and the log of the softmax sums [H, q].
    """
    fold = mask is None or mask.shape[0] > query.shape[1] or query.shape[0] == keys.shape[0]
    grouped, keys, values = _grouped(query, keys, values, fold=fold)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output.reshape(query.shape), log_sum.reshape(query.shape[:2])


def merge_parts(outputs: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Join attention over P parts of the keys (as Flash-Decoding does): [P, H, q, D] and [P, H, q] to [H, q, D].

    A part of which a query sees nothing has a log sum of minus infinity, and so no weight.
    """
    return (log_sums.softmax(0)[..., None] * outputs.float()).sum(0).to(outputs.dtype)


def _grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, fold: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring heads that share a KV head together, without copying keys: four dimensions each, as SDPA takes them.

    Folded, the group's queries become rows of one product, which reads the keys once.
    """
    kv_heads, (heads, queries, size) = keys.shape[0], query.shape
    if fold:
        return query.reshape(1, kv_heads, -1, size), keys[None], values[None]
    group_size = heads // kv_heads
    shape = (-1, group_size, -1, -1)
    return query.view(kv_heads, group_size, queries, size), keys[:, None].expand(shape), values[:, None].expand(shape)


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
