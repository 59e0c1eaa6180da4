"""Calls of the library that `kernels.cpp` becomes, on torch's tensors: contiguous, in a CPU's memory.

Numbers are float32, but for the cache and what goes into a product, which may be bfloat16. This module knows the
functions' arguments, and not when to use them. Other Python threads run during a call.
"""

import ctypes
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import structlog
import torch

from paceline.compiled import open_library
from paceline.engine.attention.dense import DenseAttention
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention, Span
from paceline.engine.native.recording import Program, Recording
from paceline.engine.native.structures import (
    AttendCall,
    AttendedRows,
    ChooseCall,
    GateCall,
    NormCall,
    ProductCall,
    RankCall,
    StepsCall,
    TakeCall,
    check_sizes,
)
from paceline.engine.plan import Places
from paceline.engine.scratch import Memory, new_memory
from paceline.engine.threads import kernel_threads

log = structlog.get_logger()

SOURCES = [Path(__file__).with_name("kernels.cpp"), *sorted(Path(__file__).parent.glob("*.h"))]
LIBRARY = Path(__file__).with_name("libkernels.so")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)
"""Head sizes that `paceline_attend` has a version for."""
ROUNDING = 3
"""Raised with every change of the last bits of a result: replicas are the same model only if they round alike."""
WIDEST, QUERIES = 16, 16
"""As in `lanes.h` and `attention.h`, for the size of working memory."""

_pointer, _flag = ctypes.c_void_p, ctypes.c_int


class PassRows:
    """Rows and pages of a pass in the form that `paceline_attend` reads, and its working memory."""

    def __init__(
        self,
        spans: Sequence[Span],
        places: Places,
        later_counts: Sequence[int] = (),
        wanted: Sequence[int] | None = None,
    ) -> None:
        """`later_counts` are by how many tokens each sequence may grow while these rows are read; empty for none.

        `wanted` are the tokens, in their order, of which more is wanted than keys and values; None for all.
        """
        numbers: list[int] = []
        lengths = [span.length + later for span, later in zip(spans, later_counts or [0] * len(spans), strict=True)]
        for span, pages, length in zip(spans, places.pages, lengths, strict=True):
            assert len(pages) * places.page_tokens >= length  # the functions do not check it
            skipped = 0 if wanted is None else _skipped(span, wanted)
            numbers += (span.start, span.count, span.length, len(pages), skipped)
        self._rows, self._pages = array("q", numbers), array("q", chain.from_iterable(places.pages))
        self.longest = max(lengths)
        self.thread_count = kernel_threads()
        padded = -(-self.longest // WIDEST) * WIDEST
        self._slots = torch.empty((self.thread_count, padded), dtype=torch.int64)
        self._scores = torch.empty((self.thread_count, QUERIES, padded))
        self.call = AttendedRows(
            *(len(spans), places.page_tokens, places.page_slots),
            *(one.buffer_info()[0] for one in (self._rows, self._pages)),
            *(one.data_ptr() for one in (self._slots, self._scores)),
            self.longest,
        )


class Kernels:
    """The functions, run by `kernel_threads`: `LayerKernels` in float32 and bfloat16, products, and choices."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._helper_count = 0
        self._recordings = _Recordings()
        self._functions: dict[str, Callable[..., None]] = {}
        for name in ("add_and_norm", "gate", "take", "attend", "product", "choose", "rank", "steps"):
            function = getattr(library, f"paceline_{name}")
            function.argtypes, function.restype = (_pointer, _flag, _flag), None
            self._functions[name] = function
        library.paceline_replay.argtypes = (_pointer, ctypes.c_int64, _pointer, _flag)
        library.paceline_replay.restype = None
        library.paceline_product_way.argtypes = (ctypes.c_char_p,)
        library.paceline_product_way.restype = _pointer

    @property
    def name(self) -> str:
        return f"{self._library.paceline_lanes()} lanes, rounding {ROUNDING}"

    def fits(self, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    def is_row_independent(self, layout: str) -> bool:
        return True

    def rows_of(
        self, attention: Attention, later_counts: Sequence[int] = (), wanted: Sequence[int] | None = None
    ) -> PassRows | None:
        if not isinstance(attention, PagedAttention | DenseAttention):
            return None
        keys, _ = attention.memory(0)
        # Unlike torch the functions do not check what they are given.
        can_read = keys.device.type == "cpu" and keys.dtype in (torch.float32, torch.bfloat16)
        return PassRows(attention.spans, attention.places, later_counts, wanted) if can_read else None

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
        places = hidden.data_ptr(), added_at, weight.data_ptr(), normed.data_ptr()
        call = NormCall(*hidden.shape, *places, epsilon)
        self._do("add_and_norm", call, is_half=dtype == torch.bfloat16, held=(hidden, added, normed))
        return normed

    def gate(
        self, gate_and_up: torch.Tensor, dtype: torch.dtype = torch.float32, memory: Memory = new_memory
    ) -> torch.Tensor:
        token_count, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
        gated = memory((token_count, size), dtype)
        call = GateCall(token_count, size, gate_and_up.data_ptr(), gated.data_ptr())
        self._do("gate", call, is_half=dtype == torch.bfloat16, held=(gate_and_up, gated))
        return gated

    def take(
        self,
        values: torch.Tensor,
        places: torch.Tensor,
        memory: Memory = new_memory,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the rows of `values` [T, N] at `places` [W], in their dtype or in `dtype`.

        Rows of `memory` may have gaps between them.
        """
        if recording := self._recordings.current:
            recording.taking(places)
        return self._taken(values, places, memory((len(places), values.shape[1]), dtype or values.dtype))

    def copied(self, values: torch.Tensor, dtype: torch.dtype, memory: Memory = new_memory) -> torch.Tensor:
        """Return a copy of `values` [T, N] in `dtype`. Rows of `memory` may have gaps between them."""
        return self._taken(values, None, memory(values.shape, dtype))

    def _taken(self, values: torch.Tensor, places: torch.Tensor | None, taken: torch.Tensor) -> torch.Tensor:
        # The function knows these dtypes alone, and gaps between rows, not in them.
        assert {values.dtype, taken.dtype} <= {torch.float32, torch.bfloat16} and taken.stride(1) == 1
        at = None if places is None else places.data_ptr(), values.data_ptr(), taken.data_ptr()
        are_half = (one.dtype == torch.bfloat16 for one in (values, taken))
        call = TakeCall(*taken.shape, taken.stride(0), *at, *are_half)
        self._do("take", call, held=(values, places, taken))
        return taken

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
        *,
        is_last: bool = False,
    ) -> torch.Tensor:
        kv_head_count, slot_count, head_size = keys.shape
        assert head_size in HEAD_SIZES
        check_positions(rows, len(rotation[0]))
        head_count = projected.shape[1] // head_size - 2 * kv_head_count
        attended = memory((projected.shape[0], head_count * head_size), keys.dtype)
        query_norm, key_norm = (one.data_ptr() for one in norms) if norms else (None, None)
        # In the order of the fields.
        call = AttendCall(
            *(ctypes.pointer(rows.call), head_count, kv_head_count, head_size, slot_count),
            *(*(one.data_ptr() for one in rotation), query_norm, key_norm),
            *(one.data_ptr() for one in (keys, values, projected, attended)),
            *(epsilon, scaling, is_last),
        )
        held = rows, projected, attended
        self._do("attend", call, keys.dtype == torch.bfloat16, held, has_count=False, thread_count=rows.thread_count)
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

        `way` is one of `product_way`, and decides the dtype of rows and weights; beside weights of int8, rows may be
        float32 or bfloat16. All else, the result [M, N] too, is float32.
        """
        (row_count, size), column_count = rows.shape, weights.shape[0] * weights.shape[2]
        out = memory((row_count, column_count), torch.float32)
        scales_at, bias_at = (None if one is None else one.data_ptr() for one in (scales, bias))
        places = way, rows.data_ptr(), weights.data_ptr(), scales_at, bias_at, out.data_ptr()
        call = ProductCall(row_count, size, column_count, *places, rows.dtype == torch.bfloat16)
        self._do("product", call, held=(rows, out))
        return out

    def choose(self, call: ChooseCall) -> None:
        """Make the choices that the call asks for."""
        self._do("choose", call)

    def rank(self, call: RankCall) -> None:
        """Make choices, and find what would have come next."""
        self._do("rank", call)

    def steps(self, call: StepsCall, thread_count: int) -> None:
        """Make passes of a program, each with the tokens that are chosen after the one before."""
        self._do("steps", call, thread_count=thread_count)

    @contextmanager
    def recording(self, wanted: torch.Tensor) -> Iterator[Recording]:
        """Note this thread's calls inside, in place of making them; see `Recording`."""
        assert self._recordings.current is None
        self._recordings.current = recording = Recording(wanted)
        try:
            yield recording
        finally:
            self._recordings.current = None

    def replay(self, program: Program, token_count: int, wanted_count: int, thread_count: int) -> None:
        """Make the calls of a program for so many tokens, of which so many are wanted."""
        self._start_helpers(thread_count - 1)
        counts = (ctypes.c_int64 * 2)(token_count, wanted_count)
        self._library.paceline_replay(program.calls, len(program.calls), counts, thread_count)

    def _do(
        self,
        name: str,
        call: ctypes.Structure,
        is_half: bool = False,
        held: Sequence[Any] = (),
        *,
        has_count: bool = True,
        thread_count: int = 0,
    ) -> None:
        """Make a call, or note it and hold what it reads and writes; `has_count` if it begins with a number of rows."""
        if recording := self._recordings.current:
            recording.add(self._functions[name], call, is_half, held, has_count=has_count)
            return
        count = thread_count or kernel_threads()
        self._start_helpers(count - 1)
        self._functions[name](ctypes.byref(call), is_half, count)

    def _start_helpers(self, count: int) -> None:
        """Start the threads that are missing; they wait in the library for as long as the process lives."""
        for number in range(self._helper_count, count):
            threading.Thread(target=self._library.paceline_work, name=f"kernels-{number}", daemon=True).start()
        self._helper_count = max(self._helper_count, count)


class _Recordings(threading.local):
    current: Recording | None = None


def _skipped(span: Span, wanted: Sequence[int]) -> int:
    """Return how many of a span's tokens come before the first wanted one."""
    at = bisect_left(wanted, span.start)
    return (span.stop if at == len(wanted) else min(wanted[at], span.stop)) - span.start


def check_positions(rows: PassRows, position_count: int) -> None:
    if rows.longest > position_count:
        raise IndexError(f"a sequence of {rows.longest} tokens has no positions beyond {position_count}")


@cache
def find_kernels() -> Kernels | None:
    """Return the kernels; None if they were not built, or from another source or for another kind of machine."""
    if not LIBRARY.exists():
        log.info("no compiled kernels; install the package where there is a C++ compiler, and passes are faster")
        return None
    try:
        library = open_library(LIBRARY, SOURCES)
        if not library.paceline_lanes():
            log.info("the compiled kernels need a processor with AVX2; torch does their work, more slowly")
            return None
        check_sizes(library)
        return Kernels(library)
    except (OSError, AttributeError) as error:
        log.warning("the compiled kernels cannot be used; install the package anew", reason=str(error))
        return None
