"""Attention of a block pass: every row reads its own pages through its table.

There are two kernels: torch's variable-length attention, which reads the table itself, and SDPA over gathered keys,
which runs on any device. `kernels` tries out which of them the torch version, the device and the page size allow.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from paceline.engine.attention.paged import write
from paceline.engine.fixed_shapes.rows import BlockRows

VarlenFunction = Callable[..., Any]
"""`torch.nn.attention.varlen.varlen_attn` or an equivalent."""


class BlockKernel(Protocol):
    """Attention over the rows of one pass, called once for each layer."""

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend for `query` [H, N * Q, D] over a layer's memory [KV heads, slots, D]; return the shape of `query`."""
        ...


KernelMaker = Callable[[BlockRows, int], BlockKernel]
"""Makes the kernel of a pass from its rows and the number of tokens in a page."""


class GatheredBlocks:
    """Copies each row's pages side by side, up to the end of its table, and masks what a query must not see.

    Behind a row's own tokens lie padding of other rows (in the scratch page) and remains of a page's last owner. A mask
    alone would not keep their infinities out, because 0 times infinity is NaN.
    """

    def __init__(self, rows: BlockRows, page_tokens: int) -> None:
        self._row_count = rows.tables.shape[0]
        within = torch.arange(page_tokens, device=rows.tables.device)
        slots = (rows.tables[:, :, None] * page_tokens + within).flatten(1)
        key_positions = torch.arange(slots.shape[1], device=slots.device)
        # Slots behind the row's tokens are replaced by its first token's, which every query sees anyway.
        is_held = key_positions < (rows.bases + rows.counts)[:, None]
        self._slots = torch.where(is_held, slots, slots[:, :1]).flatten()
        self._mask = (key_positions <= rows.positions[:, :, None])[:, None]

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        attended = F.scaled_dot_product_attention(
            self._by_row(query),
            self._by_row(keys.index_select(1, self._slots)),
            self._by_row(values.index_select(1, self._slots)),
            attn_mask=self._mask,
            scale=scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        )
        return attended.transpose(0, 1).reshape(query.shape)

    def _by_row(self, tensor: torch.Tensor) -> torch.Tensor:
        """Turn [heads, N * tokens, D] into [N, heads, tokens, D]."""
        return tensor.reshape(tensor.shape[0], self._row_count, -1, tensor.shape[2]).transpose(0, 1)


class VarlenBlocks:
    """Attention by torch's variable-length kernel, which reads the pages in place."""

    def __init__(self, rows: BlockRows, page_tokens: int, varlen_attn: VarlenFunction) -> None:
        row_count, query_count = rows.token_ids.shape
        device = rows.bases.device
        self._page_tokens = page_tokens
        self._attend = varlen_attn
        self._options: dict[str, Any] = {
            "cu_seq_q": torch.arange(row_count + 1, dtype=torch.int32, device=device) * query_count,
            "cu_seq_k": None,
            "max_q": query_count,
            "max_k": rows.tables.shape[1] * page_tokens,
            # The kernel aligns the last query with the last key, so each query sees up to its own position.
            "window_size": (-1, 0),
            "seqused_k": (rows.bases + query_count).int(),
            "block_table": rows.tables.int(),
        }

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        attended: torch.Tensor = self._attend(
            query.transpose(0, 1),
            self._pages(keys),
            self._pages(values),
            scale=scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
            **self._options,
        )
        return attended.transpose(0, 1)

    def _pages(self, memory: torch.Tensor) -> torch.Tensor:
        """View [KV heads, slots, D] as [pages, tokens, KV heads, D]."""
        return memory.view(memory.shape[0], -1, self._page_tokens, memory.shape[2]).permute(1, 2, 0, 3)


class BlockAttention:
    def __init__(
        self, memory: torch.Tensor, rows: BlockRows, page_tokens: int, scratch_page: int, kernel: KernelMaker
    ) -> None:
        """`memory` is the pool's: [2 * layers, KV heads, slots, D]."""
        self._layers = memory.unbind(0)
        self._slots = rows.slots(page_tokens, scratch_page)
        self._kernel = kernel(rows, page_tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        keys, values = self._layers[2 * layer : 2 * layer + 2]
        write(keys, self._slots, key)
        write(values, self._slots, value)
        return self._kernel(query, keys, values, scaling)
