"""Options of an engine: plain values, made from a service's settings or by a test."""

from dataclasses import dataclass

from paceline.checks import MAX_ROWS
from paceline.types import Layout, Numerics


@dataclass(frozen=True)
class EngineOptions:
    kv_memory: str = "2GiB"
    """Bytes for the cache, such as `512MiB`, or a share of what is free once the model is loaded, such as `60%`."""
    layout: Layout = "paged"
    page_tokens: int = 16
    prefix_sharing: bool = True
    prefill_chunk_tokens: int = 256
    """Most prompt tokens that one call computes, for all its rows together."""
    numerics: Numerics = "auto"
    """`auto` is strict in bfloat16, float16 and with w8a8, else fast; see `engine.numerics`."""
    fixed_shapes: bool = True
    """Whether to pad passes to shapes that are recorded and replayed, where the device's kernels allow it."""
    takes_steps: bool = False
    """Whether sequences go several steps in a row; then those are recorded at start, else single passes."""
    sequence_ttl_s: float = 600.0
    """Seconds without a call that names a sequence, after which it is freed: its owner is gone."""
    memory: str | None = None
    """Bytes for all that the process takes, such as `4GiB`; the cache gets what is left, whatever
    `kv_memory` says."""
    max_rows: int = MAX_ROWS
    """Most rows of a call."""
    lanes: int = 1
    """How many calls may be in this process at a time, which follow each other through a model's stages."""
