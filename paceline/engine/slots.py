"""Slots: the memory of a pool of pages, which passes write keys and values to and read them from.

It owns the tensor. It does not know which slots are whose.
"""

from collections.abc import Callable

import torch

from paceline.engine.attention.paged import AttentionMaker
from paceline.engine.interfaces import Attention, KvShape
from paceline.engine.plan import BatchPlan


class KvSlots:
    """Keys and values of `page_count` pages of `page_tokens` slots each, on one device."""

    def __init__(self, shape: KvShape, page_count: int, page_tokens: int, attention: AttentionMaker) -> None:
        """`attention` reads the memory and writes to it in a pass."""
        self.page_count = page_count
        self._group_size = shape.group_size
        self._attention = attention
        # Memory that was never written to is not resident, so the whole budget can be laid out at once.
        # Heads lie outside slots, because attention reads one head after the other: each is one run of bytes.
        self.memory = torch.empty(
            (2 * shape.layer_count, shape.kv_head_count, page_count * page_tokens, shape.head_size),
            dtype=shape.dtype,
            device=shape.device,
        )
        """Keys, then values, of each layer: [2 * layers, KV heads, slots, head size]."""

    def copy(self, target: int, source: int, count: int) -> None:
        """Copy `count` slots from `source` on to `target` on, which do not overlap."""
        self.memory[:, :, target : target + count] = self.memory[:, :, source : source + count]

    def attention(self, plan: BatchPlan) -> Attention:
        """Set up the attention of a pass."""
        return self._attention(self.memory, self._group_size, plan)


SlotsMaker = Callable[[KvShape, int, int, AttentionMaker], KvSlots]
"""Lays out slots of a shape, for at most so many pages of so many tokens each."""
