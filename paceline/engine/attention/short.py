"""Attention of short rows over short sequences, on a CPU in float32: two products and a softmax for each row.

Here SDPA spends more time around its arithmetic than on it. Lower precision stays with SDPA, which adds in float32.
"""

from collections.abc import Sequence

import torch

from paceline.engine.attention.common import FOLDED_QUERIES
from paceline.engine.interfaces import Span

MAX_LENGTH = 512
"""Most cached tokens; SDPA reads longer sequences in blocks that fit the processor's caches."""


def is_short(span: Span, memory: torch.Tensor) -> bool:
    """Return whether `attend_short` suits this row. A whole sequence in one row does not: SDPA skips masked keys."""
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
    """Attend for rows with equally many queries [H, q, D], each over its own `keys` and `values` [KV heads, length, D].

    `masks` come from `causal_mask`; None for a single query, which sees all keys. Return [H, q, D] for each row.
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
