"""Programs of passes on a CPU: the calls of a pass over one cache's memory, recorded once and made with any rows.

It owns when a program is recorded anew. It knows nothing of what is computed.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Generic, TypeGuard, TypeVar

import torch

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention
from paceline.engine.model.plain_layer import Layer
from paceline.engine.native import (
    Kernels,
    PackedWeight,
    PassRows,
    Program,
    RankedPlaces,
    RowInputs,
    check_positions,
    row_places,
)
from paceline.engine.native.structures import ChooseCall, RankCall, StepsCall
from paceline.engine.row_choice import RankedToken, up_to_none

CAPACITY_STEP = 32
"""Passes are recorded for multiples of so many tokens, so that slowly growing ones are not recorded each time."""


def can_record(kernels: object, layers: Sequence[Layer]) -> TypeGuard[Kernels]:
    """Return whether kernels that can run these layers can note their passes: whether nothing else is called."""
    products = [one for layer in layers for one in layer.products]
    is_packed = all(isinstance(one, PackedWeight) and one.dtype == layers[0].dtype for one in products)
    is_whole = all(isinstance(one, PackedWeight) and one.padded_count == one.column_count for one in products)
    return isinstance(kernels, Kernels) and is_packed and is_whole


def can_read(attention: Attention, dtype: torch.dtype) -> TypeGuard[PagedAttention]:
    """Return whether programs of layers of this dtype can be recorded over this attention's memory."""
    return isinstance(attention, PagedAttention) and attention.memory(0)[0].dtype == dtype


def rows_of(
    kernels: Kernels,
    attention: PagedAttention,
    position_count: int,
    wanted: torch.Tensor,
    later_counts: Sequence[int] = (),
) -> PassRows:
    """Return a pass's rows, of which the tokens `wanted` are wanted, in their order.

    Sequences may grow by `later_counts` tokens while they are read; empty for none. Raise IndexError.
    """
    rows = kernels.rows_of(attention, later_counts, wanted.tolist())
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


class LogitsPass(RecordedPass):
    """A pass of tokens whose last call is the product of a head, which has room for each pass's own logits."""

    def __init__(
        self, head: PackedWeight, kernels: Kernels, attention: PagedAttention, rows: PassRows, capacity: int
    ) -> None:
        super().__init__(kernels, attention, rows, capacity)
        self.token_ids = torch.zeros(capacity, dtype=torch.int64)
        self._head = head

    def record_logits(self, normed: torch.Tensor) -> None:
        """Note the product of the head with [W, H], as the last call."""
        # Each pass has logits of its own, which the caller keeps.
        self._head.padded(normed, lambda shape, dtype: torch.empty(0))

    def logits(self, token_count: int, wanted_count: int) -> torch.Tensor:
        """Make a pass; return its logits [W, V], without the columns that mean nothing."""
        logits = self._new_logits(wanted_count)
        self.run(token_count, wanted_count)
        return logits[:, : self._head.column_count].contiguous()

    def steps(self, token_count: int, counts: Sequence[int], inputs: RowInputs) -> list[list[int]]:
        """Make a pass and those after it, each of the rows that want more; return `counts` choices of each row.

        The first rows want the most. There are fewer choices where one cannot be made.
        """
        chosen = torch.empty((counts[0], len(counts)), dtype=torch.int64)
        self._run_steps(token_count, counts, inputs, chosen, lambda choose: RankCall(choose, 1, None))
        return [up_to_none(column[:count]) for column, count in zip(chosen.T.tolist(), counts, strict=True)]

    def ranked_steps(
        self, token_count: int, counts: Sequence[int], inputs: RowInputs, ranked_count: int
    ) -> list[list[list[RankedToken]]]:
        """Make passes as `steps` does; return the likeliest tokens at each of a row's places, the choice first."""
        found = RankedPlaces(counts[0] * len(counts), ranked_count)
        self._run_steps(token_count, counts, inputs, found.token_ids, found.call)
        places = found.places()
        return [[*takewhile(bool, places[row :: len(counts)][:count])] for row, count in enumerate(counts)]

    def _run_steps(
        self,
        token_count: int,
        counts: Sequence[int],
        inputs: RowInputs,
        chosen: torch.Tensor,
        ranking: Callable[[ChooseCall], RankCall],
    ) -> None:
        """Make as many passes as the first row wants, the first of `token_count` tokens; see `Steps` of `kernels.cpp`.

        Each reads the tokens that were chosen after the one before; these, or those ranked, are written to `chosen`.
        """
        assert self._program
        logits = self._new_logits(len(counts))  # those of the last pass alone are kept
        row_counts = array("q", (sum(count > step for count in counts) for step in range(counts[0])))
        rows, calls = row_places([logits]), self._program.calls
        call = StepsCall(
            *(ctypes.addressof(calls), len(calls), token_count, len(row_counts), row_counts.buffer_info()[0]),
            ranking(inputs.call(len(counts), self._head.column_count, rows, chosen)),
            *(ctypes.addressof(self.read), self.token_ids.data_ptr(), self.wanted.data_ptr()),
        )
        self._kernels.steps(call, self._rows.thread_count)

    def _new_logits(self, wanted_count: int) -> torch.Tensor:
        """Return memory for the next pass's logits, [W, V or a little more]."""
        logits = torch.empty((wanted_count, self._head.padded_count))
        self.last.out = logits.data_ptr()
        return logits


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
