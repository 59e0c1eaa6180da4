"""Passes over a cache, compared with attention over plain lists of tokens."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.cache.paged import KvPool
from paceline.engine.interfaces import KvCache, KvShape, Span

HEAD_COUNT = 4
SHAPE = KvShape(2, HEAD_COUNT, 2, 4, torch.float32, torch.device("cpu"))
PAGE_TOKENS = 4
PAGE_BYTES = PAGE_TOKENS * SHAPE.token_bytes


def pool_of(page_count: int, **options: Any) -> KvPool:
    return KvPool(SHAPE, page_count * PAGE_BYTES, page_tokens=PAGE_TOKENS, **options)


def vectors(prefix: Sequence[int], purpose: str) -> torch.Tensor:
    """Return a made-up model's keys or values of a prefix's last token, in all layers: [layers, KV heads, D]."""
    numbers = random.Random(f"{purpose}{tuple(prefix)}")
    values = [numbers.gauss(0, 1) for _ in range(SHAPE.layer_count * SHAPE.kv_head_count * SHAPE.head_size)]
    return torch.tensor(values).view(SHAPE.layer_count, SHAPE.kv_head_count, SHAPE.head_size)


def content(token_ids: Sequence[int], purpose: str) -> torch.Tensor:
    """Return keys or values of all tokens: [layers, KV heads, tokens, D]."""
    return torch.stack([vectors(token_ids[: stop + 1], purpose) for stop in range(len(token_ids))], dim=2)


def run_pass(cache: KvCache, rows: dict[str, tuple[list[int], int]]) -> None:
    """Attend for the last `count` tokens of each row's sequence and compare with attention over the plain tokens."""
    spans, keys, values, start = [], [], [], 0
    for sequence_id, (token_ids, count) in rows.items():
        spans.append(Span(sequence_id, start, start + count, len(token_ids)))
        keys.append(content(token_ids, "key"))
        values.append(content(token_ids, "value"))
        start += count
    query = torch.randn(HEAD_COUNT, start, SHAPE.head_size)
    attention = cache.attention(spans)
    for layer in range(SHAPE.layer_count):
        new = [
            torch.cat([one[layer][:, -span.count :] for one, span in zip(kind, spans, strict=True)], 1)
            for kind in (keys, values)
        ]
        attended = attention.attend(layer, query, new[0], new[1], 0.5)
        for span, own_keys, own_values in zip(spans, keys, values, strict=True):
            mask = torch.ones(span.count, span.length, dtype=torch.bool).tril(span.base_length)
            expected = F.scaled_dot_product_attention(
                query[None, :, span.start : span.stop],
                own_keys[None, layer],
                own_values[None, layer],
                attn_mask=mask,
                scale=0.5,
                enable_gqa=True,
            )[0]
            torch.testing.assert_close(attended[:, span.start : span.stop], expected, rtol=1e-4, atol=1e-5)


def fill(pool: KvCache, sequence_id: str, token_ids: Sequence[int]) -> int:
    """Serve a whole prompt; return how many of its tokens were reused."""
    kept = pool.keep(sequence_id, 0, token_ids[:-1])
    pool.append(sequence_id, token_ids[kept:])
    run_pass(pool, {sequence_id: (list(token_ids), len(token_ids) - kept)})
    pool.seal(sequence_id, len(token_ids))
    return kept
