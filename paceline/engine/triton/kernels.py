"""Launches of the Triton kernels, on contiguous tensors of one device.

It satisfies `LayerKernels` and `TableKernels`. Blocks and tiles depend on a model's sizes and never on the number of
rows, so no result depends on other rows.
"""

import torch
import triton

from paceline.engine.attention.tables import SPLIT_KEYS, TableAttention, TableRows
from paceline.engine.interfaces import Attention
from paceline.engine.scratch import Memory, new_memory
from paceline.engine.triton.attention_kernels import attend_kernel, combine_kernel
from paceline.engine.triton.layer_kernels import add_and_norm_kernel, gate_kernel, place_kernel, store_kernel
from paceline.engine.triton.order import can_overlap, launch_order
from paceline.engine.triton.product_kernels import ROWS, product_kernel
from paceline.engine.triton.tiles import ProductTile, attention_tile

GATE_BLOCK = 1024
WORKSPACE_BYTES = 2**28
"""Parts of a long prompt's attention wait in memory until they are joined; beyond this, some heads wait for others."""


class TritonKernels:
    def __init__(self, overlaps: bool | None = None) -> None:
        """`overlaps` says whether a kernel begins before earlier ones end; unset: where the device can."""
        self._order = launch_order(can_overlap() if overlaps is None else overlaps)

    @property
    def name(self) -> str:
        return f"Triton {triton.__version__}"

    def fits(self, head_size: int) -> bool:
        return head_size % 2 == 0

    def is_row_independent(self, layout: str) -> bool:
        return layout == "paged"

    def rows_of(self, attention: Attention) -> TableRows | None:
        return attention.rows if isinstance(attention, TableAttention) else None

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        dtype: torch.dtype = torch.float32,
        memory: Memory = new_memory,
    ) -> torch.Tensor:
        token_count, size = hidden.shape
        normed = torch.empty((token_count, size), dtype=dtype, device=hidden.device)
        block = triton.next_power_of_2(size)
        has_added = added is not None
        add_and_norm_kernel[(token_count,)](
            hidden,
            added if has_added else hidden,
            weight,
            normed,
            size,
            epsilon,
            HAS_ADDED=has_added,
            BLOCK=block,
            **self._order,
        )
        return normed

    def gate(
        self, gate_and_up: torch.Tensor, dtype: torch.dtype = torch.float32, memory: Memory = new_memory
    ) -> torch.Tensor:
        token_count, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
        gated = torch.empty((token_count, size), dtype=dtype, device=gate_and_up.device)
        gate_kernel[(token_count, triton.cdiv(size, GATE_BLOCK))](
            gate_and_up, gated, size, BLOCK=GATE_BLOCK, **self._order
        )
        return gated

    def take(self, values: torch.Tensor, places: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        return values[places]

    def copied(self, values: torch.Tensor, dtype: torch.dtype, memory: Memory = new_memory) -> torch.Tensor:
        return values.to(dtype, copy=True)

    def attend(
        self,
        rows: TableRows,
        projected: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        memory: Memory = new_memory,
        *,
        is_last: bool = False,
    ) -> torch.Tensor:
        token_count, (kv_head_count, slot_count, size) = len(projected), keys.shape
        head_count = projected.shape[1] // size - 2 * kv_head_count
        query = torch.empty((token_count, head_count, size), dtype=keys.dtype, device=keys.device)
        place_kernel[(token_count, head_count + kv_head_count)](
            *(projected, query, keys, values, rows.slots, rows.positions, *rotation, *(norms or rotation)),
            *(epsilon, head_count, kv_head_count, slot_count),
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            HAS_NORM=norms is not None,
            **self._order,
        )
        return self.read(rows, query, keys, values, scaling).view(token_count, -1)

    def store(
        self, rows: TableRows, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        kv_head_count, token_count, size = key.shape
        store_kernel[(token_count, kv_head_count)](
            *(key.contiguous(), value.contiguous(), keys, values, rows.slots, token_count, keys.shape[1]),
            HALF=size // 2,
            BLOCK=triton.next_power_of_2(size // 2),
            **self._order,
        )

    def read(
        self, rows: TableRows, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        (token_count, head_count, size), kv_head_count = query.shape, keys.shape[0]
        group_size, attended = head_count // kv_head_count, torch.empty_like(query)
        head_bytes = 4 * token_count * group_size * rows.split_count * (size + 2)
        part_size = min(kv_head_count, max(1, WORKSPACE_BYTES // head_bytes))
        for first in range(0, kv_head_count, part_size):
            part = range(first, min(first + part_size, kv_head_count))
            self._read_heads(rows, query, keys, values, scaling, part, attended)
        return attended

    def _read_heads(
        self,
        rows: TableRows,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        kv_heads: range,
        attended: torch.Tensor,
    ) -> None:
        """Attend with the queries of some KV heads, and store the result in `attended` [T, H, D]."""
        token_count, head_count, size = query.shape
        group_size, split_count = head_count // keys.shape[0], rows.split_count
        own_count = group_size * len(kv_heads)
        sums = torch.empty((token_count, own_count, split_count, size), device=query.device)
        weights = torch.empty((token_count, own_count, split_count, 2), device=query.device)
        tile = attention_tile(group_size, size, keys.dtype)
        attend_kernel[(len(rows.tiles), len(kv_heads), split_count)](
            *(query, keys, values, rows.tiles, rows.tables, sums, weights, scaling),
            *(head_count, own_count, kv_heads.start, keys.shape[1], rows.tables.shape[1], split_count),
            HEAD_SIZE=size,
            HEAD_BLOCK=tile.head_block,
            PAGE_TOKENS=rows.page_tokens,
            GROUP=group_size,
            QUERIES=tile.queries,
            ROWS=tile.rows,
            SPLIT=SPLIT_KEYS,
            STEP=tile.step,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **self._order,
        )
        combine_kernel[(token_count, own_count)](
            *(sums, weights, rows.positions, rows.slots, attended),
            *(head_count, own_count, kv_heads.start * group_size, split_count),
            HEAD_SIZE=size,
            HEAD_BLOCK=tile.head_block,
            SPLIT=SPLIT_KEYS,
            **self._order,
        )

    def product(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: ProductTile
    ) -> torch.Tensor:
        """Multiply `rows` [M, K] by `weight` [N, K] and add the bias. Return [M, N] in float32."""
        row_count, (column_count, size) = len(rows), weight.shape
        out = torch.empty((row_count, column_count), device=rows.device)
        product_kernel[(triton.cdiv(row_count, ROWS), triton.cdiv(column_count, tile.columns))](
            *(rows, weight, weight if bias is None else bias, out, row_count, column_count, size),
            ROWS=ROWS,
            COLUMNS=tile.columns,
            STEP=tile.step,
            HAS_BIAS=bias is not None,
            IS_EVEN=size % tile.step == 0,
            num_stages=tile.stages,
            **self._order,
        )
        return out
