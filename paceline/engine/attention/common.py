"""The one attention function that models call, and the arithmetic that every cache layout shares.

The function is registered with transformers as `paceline_ragged`. A model loaded with that name gives it every layer's
queries, keys and values, and it gives them to the pass under way. No query sees another sequence.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from paceline.engine.attention.longest import hides_tokens
from paceline.engine.interfaces import Attention, Span
from paceline.errors import ModelNotUsable

ATTENTION_NAME = "paceline_ragged"
FOLDED_QUERIES = 16
"""Most queries for which the heads that share a KV head become rows of one product, which reads the keys once."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`Attention.attend` for one layer: stores its keys and values, then attends."""
UNSUPPORTED = {
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

    Return [1, T, H, D]. Raise ModelNotUsable when the model asks for a kind of attention that the engine lacks.
    """
    used = [meaning for name, meaning in UNSUPPORTED.items() if options.get(name) is not None]
    window = options.get("sliding_window")
    if window is not None and hides_tokens(window, getattr(module, "config", None)):
        used.append(f"sliding-window attention (a window of {window})")
    if attention_mask is not None:  # transformers makes none for this function: the model has made it, or changed it
        used.append("an attention mask of its own")
    if used:
        raise ModelNotUsable(f"the model uses {', '.join(used)}, which the engine does not run")
    layer = cast(int, module.layer_idx)
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    attended = packed_attention.attend(layer, query[0], key[0], value[0], scale)
    return attended.transpose(0, 1)[None].contiguous(), None  # which some models view in another shape


class Shield:
    """Hides a token whose key or value is not finite from the queries before it, in a pass on a CPU.

    A weight of 0 does not hide an infinity, and whatever reaches an earlier token is cached with it, and perhaps
    shared. The search for infinities costs two sums a layer, and is made only if a query has tokens after it.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self._spans = spans
        # On another device the host would have to wait for the sums.
        self._looks = device.type == "cpu" and any(span.count > 1 for span in spans)

    def attend(self, attend: Attend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the result of `attend` for tensors of [H, T, D], as if all tokens after a query were finite.

        This holds for the queries before a row's first token that is not finite; the others may see later ones too.
        """
        if not self._looks or isfinite(key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32)):
            return attend(query, key, value)
        wrong = ~(key.isfinite().all(2).all(0) & value.isfinite().all(2).all(0))
        late = torch.zeros_like(wrong)
        for span in self._spans:
            late[span.start : span.stop] = wrong[span.start : span.stop].cumsum(0) > 0
        early = attend(query, *(one.masked_fill(wrong[:, None], 0) for one in (key, value)))
        # This call comes last, because the cache keeps what is stored last.
        return torch.where(late[:, None], attend(query, key, value), early)


def causal_mask(query_count: int, length: int, group_size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the additive mask [query_count, length] of the last queries over all keys, with `like`'s dtype and device.

    Few queries are folded (see `_grouped`): their mask is [group_size * query_count, length], repeated for each head.
    """
    mask = torch.full((query_count, length), float("-inf"), dtype=like.dtype, device=like.device)
    mask = mask.triu(length - query_count + 1)
    return mask.repeat(group_size, 1) if query_count <= FOLDED_QUERIES else mask


def attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attend for one sequence: `query` [H, q, D], `keys` and `values` [KV heads, length, D], `mask` of `causal_mask`.

    Without a mask a single query sees all keys; several queries must be the whole sequence, and are masked causally.
    Return the H * q * D elements in order.
    """
    is_causal = mask is None and query.shape[1] > 1
    query, keys, values = _grouped(query, keys, values, fold=not is_causal and query.shape[1] <= FOLDED_QUERIES)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a part of a sequence's keys, for `merge_parts`; CPU only. Without `mask` every query sees every key.

    Return the output [H, q, D] and the log of the softmax sums [H, q].
    """
    fold = mask is None or mask.shape[0] > query.shape[1] or query.shape[0] == keys.shape[0]
    grouped, keys, values = _grouped(query, keys, values, fold=fold)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output.reshape(query.shape), log_sum.reshape(query.shape[:2])


def merge_parts(outputs: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """Join attention over P parts of the keys (as Flash-Decoding does): [P, H, q, D] and [P, H, q] to [H, q, D].

    A part that a query does not see has a log sum of minus infinity, and so no weight.
    """
    return (log_sums.softmax(0)[..., None] * outputs.float()).sum(0).to(outputs.dtype)


def _grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, fold: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the heads that share a KV head together without copying keys, in the four dimensions that SDPA takes.

    With `fold` their queries become rows of one product, which reads the keys once.
    """
    kv_heads, (heads, queries, size) = keys.shape[0], query.shape
    if fold:
        return query.reshape(1, kv_heads, -1, size), keys[None], values[None]
    group_size = heads // kv_heads
    shape = (-1, group_size, -1, -1)
    return query.view(kv_heads, group_size, queries, size), keys[:, None].expand(shape), values[:, None].expand(shape)


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
