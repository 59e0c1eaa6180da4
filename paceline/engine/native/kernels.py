"""Calls of the functions in `kernels.cpp`, on torch's tensors: contiguous, in a CPU's memory.

Numbers are float32, but for the cache and what goes into a product, which may be bfloat16. This module knows the
functions' arguments, and not when to use them. Other Python threads run during a call.
"""

import ctypes
import threading
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import structlog
import torch

from paceline.engine.attention.dense import DenseAttention
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention, Span
from paceline.engine.plan import Places
from paceline.engine.scratch import Memory, new_memory
from paceline.engine.threads import kernel_threads

log = structlog.get_logger()

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "crew.h", "lanes.h", "products.h")]
LIBRARY = Path(__file__).with_name("libkernels.so")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)
"""Head sizes that `paceline_attend` has a version for."""
ROUNDING = 2
"""Raised with every change of the last bits of a result: replicas are the same model only if they round alike."""
WIDEST, QUERIES = 16, 4
"""As in `lanes.h` and `kernels.cpp`, for the size of working memory."""

_pointer, _number, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _NormCall(ctypes.Structure):
    """`Norm` in `kernels.cpp`."""

    _fields_ = (
        *((name, _pointer) for name in ("hidden", "added", "weight")),
        ("epsilon", _real),
        *((name, _number) for name in ("token_count", "size")),
        ("normed", _pointer),
    )


class _GateCall(ctypes.Structure):
    """`Gate` in `kernels.cpp`."""

    _fields_ = (("gate_and_up", _pointer), ("token_count", _number), ("size", _number), ("gated", _pointer))


class _AttendCall(ctypes.Structure):
    """`Attend` in `kernels.cpp`."""

    _fields_ = (
        *((name, _number) for name in ("row_count", "head_count", "kv_head_count", "head_size", "slot_count")),
        *((name, _number) for name in ("page_tokens", "page_slots")),
        *((name, _pointer) for name in ("rows", "pages", "cosines", "signed_sines", "query_norm", "key_norm")),
        *((name, _real) for name in ("epsilon", "scaling")),
        *((name, _pointer) for name in ("keys", "values", "projected", "attended", "slots", "scores")),
        ("longest", _number),
    )


class _ProductCall(ctypes.Structure):
    """`Product` in `products.h`."""

    _fields_ = (
        ("way", _pointer),
        *((name, _number) for name in ("row_count", "size", "column_count")),
        *((name, _pointer) for name in ("rows", "weights", "scales", "bias", "out")),
    )


class PassRows:
    """Rows and pages of a pass in the form that `paceline_attend` reads, and its working memory."""

    def __init__(self, spans: Sequence[Span], places: Places) -> None:
        numbers: list[int] = []
        for span, pages in zip(spans, places.pages, strict=True):
            assert len(pages) * places.page_tokens >= span.length  # the functions do not check it
            numbers += (span.start, span.count, span.length, len(pages))
        self.row_count = len(spans)
        self.rows = torch.tensor(numbers)
        self.pages = torch.tensor([*chain.from_iterable(places.pages)])
        self.page_tokens, self.page_slots = places.page_tokens, places.page_slots
        self.longest = max(span.length for span in spans)
        self.thread_count = kernel_threads()
        padded = -(-self.longest // WIDEST) * WIDEST
        self.slots = torch.empty((self.thread_count, padded), dtype=torch.int64)
        self.scores = torch.empty((self.thread_count, QUERIES, padded))


class Kernels:
    """The functions, run by `kernel_threads`: `LayerKernels` in float32 and bfloat16, and products."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._helper_count = 0
        for name in ("add_and_norm", "gate", "attend"):
            function = getattr(library, f"paceline_{name}")
            function.argtypes, function.restype = (_pointer, ctypes.c_int, ctypes.c_int), None
        library.paceline_product.argtypes = (_pointer, ctypes.c_int)
        library.paceline_product.restype = None
        library.paceline_product_way.argtypes = (ctypes.c_char_p,)
        library.paceline_product_way.restype = _pointer

    @property
    def name(self) -> str:
        return f"{self._library.paceline_lanes()} lanes, rounding {ROUNDING}"

    def fits(self, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    def is_row_independent(self, layout: str) -> bool:
        return True

    def rows_of(self, attention: Attention) -> PassRows | None:
        if not isinstance(attention, PagedAttention | DenseAttention):
            return None
        keys, _ = attention.memory(0)
        # Unlike torch the functions do not check what they are given.
        can_read = keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16)
        return PassRows(attention.spans, attention.places) if can_read else None

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        dtype: torch.dtype = torch.float32,
        memory: Memory = new_memory,
    ) -> torch.Tensor:
        normed = memory(hidden.shape, dtype)
        added_at = None if added is None else added.data_ptr()
        call = _NormCall(hidden.data_ptr(), added_at, weight.data_ptr(), epsilon, *hidden.shape, normed.data_ptr())
        self._library.paceline_add_and_norm(ctypes.byref(call), dtype == torch.bfloat16, self._threads())
        return normed

    def gate(
        self, gate_and_up: torch.Tensor, dtype: torch.dtype = torch.float32, memory: Memory = new_memory
    ) -> torch.Tensor:
        token_count, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
        gated = memory((token_count, size), dtype)
        call = _GateCall(gate_and_up.data_ptr(), token_count, size, gated.data_ptr())
        self._library.paceline_gate(ctypes.byref(call), dtype == torch.bfloat16, self._threads())
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
        memory: Memory = new_memory,
    ) -> torch.Tensor:
        (kv_head_count, slot_count, head_size), position_count = keys.shape, len(rotation[0])
        assert head_size in HEAD_SIZES
        if rows.longest > position_count:
            raise IndexError(f"a sequence of {rows.longest} tokens has no positions beyond {position_count}")
        head_count = projected.shape[1] // head_size - 2 * kv_head_count
        attended = memory((projected.shape[0], head_count * head_size), keys.dtype)
        query_norm, key_norm = (one.data_ptr() for one in norms) if norms else (None, None)
        # In the order of the fields.
        call = _AttendCall(
            *(rows.row_count, head_count, kv_head_count, head_size, slot_count, rows.page_tokens, rows.page_slots),
            *(one.data_ptr() for one in (rows.rows, rows.pages, *rotation)),
            *(query_norm, key_norm, epsilon, scaling),
            *(one.data_ptr() for one in (keys, values, projected, attended, rows.slots, rows.scores)),
            rows.longest,
        )
        self._start_helpers(rows.thread_count - 1)
        self._library.paceline_attend(ctypes.byref(call), keys.dtype == torch.bfloat16, rows.thread_count)
        return attended

    def product_way(self, name: str) -> int | None:
        """Return where the function of this way of `products.h` is; None if this machine cannot multiply so."""
        way: int | None = self._library.paceline_product_way(name.encode())
        return way

    def product(
        self,
        way: int,
        rows: torch.Tensor,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        memory: Memory = new_memory,
    ) -> torch.Tensor:
        """Multiply `rows` [M, K] by arranged `weights` [N / 16, ., 16, .] and the sums by `scales` [N]; add `bias` [N].

        `way` is one of `product_way`, and decides the dtype of rows and weights. All else, the result [M, N] too, is
        float32.
        """
        (row_count, size), column_count = rows.shape, weights.shape[0] * weights.shape[2]
        out = memory((row_count, column_count), torch.float32)
        scales_at, bias_at = (None if one is None else one.data_ptr() for one in (scales, bias))
        places = rows.data_ptr(), weights.data_ptr(), scales_at, bias_at, out.data_ptr()
        call = _ProductCall(way, row_count, size, column_count, *places)
        self._library.paceline_product(ctypes.byref(call), self._threads())
        return out

    def _threads(self) -> int:
        """Return how many threads may share a piece of work."""
        count = kernel_threads()
        self._start_helpers(count - 1)
        return count

    def _start_helpers(self, count: int) -> None:
        """Start the threads that are missing; they wait in the library for as long as the process lives."""
        for number in range(self._helper_count, count):
            threading.Thread(target=self._library.paceline_work, name=f"kernels-{number}", daemon=True).start()
        self._helper_count = max(self._helper_count, count)


@cache
def find_kernels() -> Kernels | None:
    """Return the kernels; None if they were not built, or from another source or for another kind of machine."""
    if not LIBRARY.exists():
        log.info("no compiled kernels; install the package where there is a C++ compiler, and passes are faster")
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.paceline_source.restype = ctypes.c_uint32
        if library.paceline_source() != zlib.crc32(b"".join(one.read_bytes() for one in SOURCES)):
            reason = "they were compiled from another source"
        elif not library.paceline_lanes():
            log.info("the compiled kernels need a processor with AVX2; torch does their work, more slowly")
            return None
        else:
            return Kernels(library)
    except (OSError, AttributeError) as error:
        reason = str(error)
    log.warning("the compiled kernels cannot be used; install the package anew", reason=reason)
    return None
