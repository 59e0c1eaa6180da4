"""Attention through page tables on the device, by kernels that read them there.

Nothing of a pass is known to the host but its shape, so passes can be recorded and replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.engine.plan import BatchPlan
from paceline.engine.transfer import to_device

SPLIT_KEYS = 256
"""Keys of a sequence are cut here, whatever else is computed, and the parts are read by different programs."""
TILE_ROWS = 64
"""Most rows of a tile: queries times the heads that share a KV head."""
TILE_QUERIES = 16


def tile_queries(group_size: int) -> int:
    """Return how many neighbouring queries a tile holds; a function of the model alone, so that results are too."""
    return max(1, min(TILE_QUERIES, TILE_ROWS // group_size))


@dataclass(frozen=True)
class TableRows:
    """The rows of a pass on the device, T tokens in all. All tensors are int64."""

    positions: torch.Tensor
    """[T], within the model's."""
    slots: torch.Tensor
    """[T]: where keys and values go; -1 for padding."""
    tiles: torch.Tensor
    """[M, 4]: first token, number of queries, position of the first, row of `tables`."""
    tables: torch.Tensor
    """Pages of each row, [N, P]; what follows a row's own is not read."""
    page_tokens: int

    @property
    def split_count(self) -> int:
        """Most parts of a sequence."""
        return -(-self.tables.shape[1] * self.page_tokens // SPLIT_KEYS)


class TableKernels(Protocol):
    def store(
        self, rows: TableRows, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store new keys and values [KV heads, T, D] in a layer's memory [KV heads, slots, D]."""
        ...

    def read(
        self, rows: TableRows, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Let every query [T, H, D] see its own sequence up to itself; return the shape of `query`."""
        ...


class TableAttention:
    def __init__(self, memory: torch.Tensor, rows: TableRows, kernels: TableKernels) -> None:
        """`memory` is the pool's: [2 * layers, KV heads, slots, D]."""
        self.rows = rows
        self._layers = memory.unbind(0)
        self._kernels = kernels

    def memory(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all slots, [KV heads, slots, D] each."""
        return self._layers[2 * layer], self._layers[2 * layer + 1]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self.memory(layer)
        self._kernels.store(self.rows, key, value, keys, values)
        attended = self._kernels.read(self.rows, query.transpose(0, 1).contiguous(), keys, values, scaling)
        return attended.transpose(0, 1)


def planned_rows(plan: BatchPlan, group_size: int, device: torch.device) -> TableRows:
    """Return the rows of a pass without padding."""
    positions = [position for span in plan.spans for position in range(span.base_length, span.length)]
    size, tiles = tile_queries(group_size), list[tuple[int, int, int, int]]()
    for row, span in enumerate(plan.spans):
        for done in range(0, span.count, size):
            tiles.append((span.start + done, min(size, span.count - done), span.base_length + done, row))
    return TableRows(
        to_device(positions, device),
        to_device(plan.slots, device),
        to_device(tiles, device),
        to_device(_tables(plan), device),
        plan.page_tokens,
    )


def _tables(plan: BatchPlan) -> list[list[int]]:
    counts = [-(-span.length // plan.page_tokens) for span in plan.spans]
    pages: list[Sequence[int]] = [own[:count] for own, count in zip(plan.pages, counts, strict=True)]
    return [[*own, *[0] * (max(counts) - len(own))] for own in pages]
