"""Calls of the functions in `kernels.cpp`, on torch's tensors: float32 (or int64), contiguous, in a CPU's memory.

This module knows the functions' arguments, and not when to use them. Other Python threads run during a call.
"""

import ctypes
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import structlog
import torch

from paceline.engine.interfaces import Span

log = structlog.get_logger()

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "lanes.h")]
LIBRARY = Path(__file__).with_name("libkernels.so")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)
"""Head sizes that `paceline_attend` has a version for."""
LANES = 16


class _AttendCall(ctypes.Structure):
    """`Attend` in `kernels.cpp`."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("row_count", "head_count", "kv_head_count", "head_size", "slot_count")]
        + [
            (name, ctypes.c_void_p)
            for name in ("rows", "segments", "cosines", "signed_sines", "query_norm", "key_norm")
        ]
        + [(name, ctypes.c_float) for name in ("epsilon", "scaling")]
        + [(name, ctypes.c_void_p) for name in ("keys", "values", "projected", "attended")]
    )


class PassRows:
    """Rows and segments of a pass in the form that `paceline_attend` reads, and its working memory."""

    def __init__(self, spans: Sequence[Span], segments: Sequence[Sequence[tuple[int, int]]]) -> None:
        """`segments` [start, stop) hold each row's cached tokens in order, the new ones included."""
        numbers: list[int] = []
        for span, parts in zip(spans, segments, strict=True):
            numbers += (span.start, span.count, span.length, len(parts))
        self.row_count = len(spans)
        self.rows = torch.tensor(numbers)
        self.segments = torch.tensor([slot for parts in segments for part in parts for slot in part])
        self.longest = max(span.length for span in spans)
        self.slots = torch.empty(self.longest, dtype=torch.int64)
        self.scores = torch.empty((self.longest + 3, LANES))


class Kernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._add_and_norm = library.paceline_add_and_norm
        self._add_and_norm.argtypes = (pointer, pointer, pointer, real, number, number, pointer)
        self._gate = library.paceline_gate
        self._gate.argtypes = (pointer, number, number, pointer)
        self._attend = library.paceline_attend
        self._attend.argtypes = (pointer, pointer, pointer)
        for function in (self._add_and_norm, self._gate, self._attend):
            function.restype = None

    def add_and_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `added` [T, N] to `hidden` [T, N], in place; return its root mean square norm [T, N]."""
        normed = torch.empty_like(hidden)
        added_at = None if added is None else added.data_ptr()
        self._add_and_norm(hidden.data_ptr(), added_at, weight.data_ptr(), epsilon, *hidden.shape, normed.data_ptr())
        return normed

    def gate(self, gate_and_up: torch.Tensor) -> torch.Tensor:
        """Multiply the silu of the first half of [T, 2 N] by the second: [T, N] (SwiGLU; Shazeer, arXiv 2002.05202)."""
        token_count, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
        gated = gate_and_up.new_empty(token_count, size)
        self._gate(gate_and_up.data_ptr(), token_count, size, gated.data_ptr())
        return gated

    def attend(
        self,
        rows: PassRows,
        projected: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
    ) -> torch.Tensor:
        """Store the new keys and values, and let every query see its own sequence up to itself.

        `projected` holds queries, keys and values, [T, (H + 2 KV heads) * D], and is overwritten. `keys` and `values`
        are a layer's memory, [KV heads, slots, D]. `rotation` is the cosines and the signed sines, [positions, D].
        `norms` are the weights [D] of the query and the key norm. Return [T, H * D].
        """
        kv_head_count, slot_count, head_size = keys.shape
        assert head_size in HEAD_SIZES
        head_count = projected.shape[1] // head_size - 2 * kv_head_count
        attended = projected.new_empty(projected.shape[0], head_count * head_size)
        query_norm, key_norm = (one.data_ptr() for one in norms) if norms else (None, None)
        # In the order of the fields.
        call = _AttendCall(
            *(rows.row_count, head_count, kv_head_count, head_size, slot_count),
            *(one.data_ptr() for one in (rows.rows, rows.segments, *rotation)),
            *(query_norm, key_norm, epsilon, scaling),
            *(one.data_ptr() for one in (keys, values, projected, attended)),
        )
        self._attend(ctypes.byref(call), rows.slots.data_ptr(), rows.scores.data_ptr())
        return attended


@cache
def find_kernels() -> Kernels | None:
    """Return the kernels; None if they were not built, or from another source or for another kind of machine."""
    if not LIBRARY.exists():
        log.info("no compiled kernels; install the package where there is a C++ compiler, and passes are faster")
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.paceline_source.restype = ctypes.c_uint32
        if library.paceline_source() == zlib.crc32(b"".join(one.read_bytes() for one in SOURCES)):
            return Kernels(library)
        reason = "they were compiled from another source"
    except (OSError, AttributeError) as error:
        reason = str(error)
    log.warning("the compiled kernels cannot be used; install the package anew", reason=reason)
    return None
