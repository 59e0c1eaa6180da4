"""Attention of short rows over short sequences, on a CPU in float32: two products and a softmax each.

What SDPA does around its arithmetic takes longer there than the arithmetic. In lower precision it stays SDPA's, which
adds in float32.
"""

from collections.abc import Sequence

import torch

from paceline.engine.attention.common import FOLDED_QUERIES
from paceline.engine.interfaces import Span

MAX_LENGTH = 512
"""Longer sequences are read in blocks that fit the processor's caches, which SDPA does."""


def is_short(span: Span, memory: torch.Tensor) -> bool:
    """Whether `attend_short` is for this row of a pass. A whole sequence at once is not: SDPA skips what is masked."""
    if memory.device.type != "cpu" or memory.dtype != torch.float32:
        return False
    return span.length <= MAX_LENGTH and (span.count == 1 or span.count < min(span.length, FOLDED_QUERIES + 1))


def attend_short(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor | None],
    scaling: float,
) -> list[torch.Tensor]:
    """Attend for rows of as many queries each: [H, q, D] a row, `keys` and `values` [KV heads, length, D], its own.

    `masks` are as `attention.causal_mask` makes them; None for single queries, which see all. Returns [H, q, D] a row.
    """
    kv_heads, _, size = keys[0].shape
    # Heads that share a KV head become rows of one product, for all sequences at once.
    grouped = torch.stack(list(queries)).mul_(scaling).view(len(queries), kv_heads, -1, size).unbind(0)
    outputs = []
    for own_queries, own_keys, own_values, mask in zip(grouped, keys, values, masks, strict=True):
        transposed = own_keys.mT
        scores = torch.bmm(own_queries, transposed) if mask is None else torch.baddbmm(mask, own_queries, transposed)
        outputs.append(torch.bmm(scores.softmax(-1), own_values).view(queries[0].shape))
    return outputs
