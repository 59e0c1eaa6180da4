"""Programs of passes on a CPU: the calls of a pass over one cache's memory, recorded once and made with any rows.

It owns when a program is recorded anew. It knows nothing of what is computed.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeGuard, TypeVar

import torch

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention
from paceline.engine.model.plain_layer import Layer
from paceline.engine.native import Kernels, PackedWeight, PassRows, Program, check_positions
from paceline.engine.native.structures import ChooseCall, StepsCall

CAPACITY_STEP = 32
"""Passes are recorded for multiples of so many tokens, so that slowly growing ones are not recorded each time."""


def can_record(kernels: object, layers: Sequence[Layer]) -> TypeGuard[Kernels]:
    """Return whether kernels that can run these layers can note their passes: whether nothing else is called."""
    products = [one for layer in layers for one in layer.products]
    is_packed = all(isinstance(one, PackedWeight) and one.dtype == layers[0].dtype for one in products)
    is_whole = all(isinstance(one, PackedWeight) and one.padded_count == one.column_count for one in products)
    # Without a norm before it, a product has to round what it reads.
    is_rounded = layers[0].before_attention is not None or layers[0].dtype == torch.float32
    return isinstance(kernels, Kernels) and is_packed and is_whole and is_rounded


def can_read(attention: Attention, dtype: torch.dtype) -> TypeGuard[PagedAttention]:
    """Return whether programs of layers of this dtype can be recorded over this attention's memory."""
    return isinstance(attention, PagedAttention) and attention.memory(0)[0].dtype == dtype


def rows_of(kernels: Kernels, attention: PagedAttention, position_count: int, later_count: int = 0) -> PassRows:
    """Return a pass's rows. Sequences may grow by `later_count` tokens while they are read. Raise IndexError."""
    rows = kernels.rows_of(attention, later_count)
    assert rows
    check_positions(rows, position_count)
    return rows


class RecordedPass:
    def __init__(self, kernels: Kernels, attention: PagedAttention, rows: PassRows, capacity: int) -> None:
        """Record passes of at most `capacity` tokens over the memory of this attention, within `recording`."""
        self.capacity, self.memory = capacity, _memory_of(attention)
        self.wanted = torch.zeros(capacity, dtype=torch.int64)
        """Places of the tokens of which something is wanted."""
        self.read = rows.call
        """The rows as all passes read them."""
        self.last: Any = None
        """The arguments of the last call."""
        self._kernels, self._rows = kernels, rows
        self._program: Program | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._kernels.recording(self.wanted) as recording:
            yield
        self._program, self.last = Program(recording), recording.last

    def fill(self, wanted: torch.Tensor, rows: PassRows) -> None:
        """Write the numbers of the next pass."""
        self.wanted[: len(wanted)] = wanted
        self._rows = rows
        if rows.call is not self.read:
            ctypes.memmove(ctypes.byref(self.read), ctypes.byref(rows.call), ctypes.sizeof(rows.call))

    def run(self, token_count: int, wanted_count: int) -> None:
        assert self._program
        self._kernels.replay(self._program, token_count, wanted_count, self._rows.thread_count)

    def run_steps(
        self, token_count: int, row_counts: "array[int]", choose: ChooseCall, token_ids: torch.Tensor
    ) -> None:
        """Make a pass for each of `row_counts`, the first of `token_count` tokens.

        Each reads `token_ids`, which become those that `choose` chooses after it; see `Steps` of `kernels.cpp`.
        """
        assert self._program
        calls = self._program.calls
        call = StepsCall(
            *(ctypes.addressof(calls), len(calls), token_count, len(row_counts), row_counts.buffer_info()[0]),
            *(choose, ctypes.addressof(self.read), token_ids.data_ptr(), self.wanted.data_ptr()),
        )
        self._kernels.steps(call, self._rows.thread_count)


RecordedT = TypeVar("RecordedT", bound=RecordedPass)
KindT = TypeVar("KindT")


class Programs(threading.local, Generic[RecordedT, KindT]):
    """The program of passes of each thread, as memory for passes is each thread's own."""

    def __init__(self, make: Callable[[PagedAttention, PassRows, int, KindT], RecordedT]) -> None:
        """`make` records passes of a kind, of at most so many tokens."""
        self._make = make
        self._kept: tuple[KindT, RecordedT] | None = None

    def begun(
        self, token_count: int, wanted: torch.Tensor, attention: PagedAttention, rows: PassRows, kind: KindT
    ) -> RecordedT:
        """Return the program with a pass's numbers filled in."""
        capacity, memory = -(-token_count // CAPACITY_STEP) * CAPACITY_STEP, _memory_of(attention)
        recorded = self._kept[1] if self._kept and self._kept[0] == kind else None
        if recorded is None or recorded.memory != memory or recorded.capacity < token_count:
            recorded = self._make(attention, rows, capacity, kind)
            self._kept = kind, recorded
        recorded.fill(wanted, rows)
        return recorded


def _memory_of(attention: PagedAttention) -> tuple[int, torch.Size]:
    """Return where keys and values lie, and how: of the same place and shape a program reads the same."""
    keys, _ = attention.memory(0)
    return keys.data_ptr(), keys.shape
