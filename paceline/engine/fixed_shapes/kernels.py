"""The choice of the attention kernel for page tables, by trial on this torch and device."""

from functools import partial

import structlog
import torch

from paceline.engine.fixed_shapes.attention import GatheredBlocks, KernelMaker, VarlenBlocks, VarlenFunction
from paceline.engine.fixed_shapes.rows import BlockRows
from paceline.engine.interfaces import KvShape

log = structlog.get_logger()

TOLERANCE = 2e-2
"""Largest accepted difference. Half precision rounds by less; reading wrong pages or keys is off by far more."""


def find_varlen() -> VarlenFunction | None:
    """Return torch's variable-length attention; None if this torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@torch.inference_mode()
def choose_kernel(shape: KvShape, page_tokens: int, varlen_attn: VarlenFunction | None) -> KernelMaker:
    """Return the variable-length kernel if it agrees with gathering for these pages and heads, else gathering."""
    if varlen_attn is None:
        return GatheredBlocks
    varlen = partial(VarlenBlocks, varlen_attn=varlen_attn)
    try:
        difference = _difference(varlen, shape, page_tokens)
    except (RuntimeError, TypeError, ValueError) as error:
        # Older versions take no table; some refuse pages of this size, or this device or dtype.
        log.info("keys are gathered for attention; the variable-length kernel refused", error=str(error))
        return GatheredBlocks
    if not difference <= TOLERANCE:
        log.warning("keys are gathered for attention; the variable-length kernel was wrong", difference=difference)
        return GatheredBlocks
    return varlen


def _difference(varlen: KernelMaker, shape: KvShape, page_tokens: int) -> float:
    """Return the largest difference between the two kernels on three rows whose pages are out of order."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(shape.device, shape.dtype)

    tables = torch.tensor([[5, 0, 3], [1, 4, 6], [2, 6, 6]], device=shape.device)
    bases = torch.tensor([2 * page_tokens, page_tokens - 1, 0], device=shape.device)
    counts = torch.full((3,), 2, device=shape.device)
    rows = BlockRows(torch.zeros((3, 2), dtype=torch.int64, device=shape.device), counts, bases, tables)
    keys, values = (random(shape.kv_head_count, 7 * page_tokens, shape.head_size) for _ in range(2))
    query = random(shape.head_count, 6, shape.head_size)
    scaling = shape.head_size**-0.5
    one, other = (kernel(rows, page_tokens)(query, keys, values, scaling) for kernel in (varlen, GatheredBlocks))
    return float((one.float() - other.float()).abs().max())
