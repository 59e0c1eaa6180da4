"""A compiled decoder on a CPU: all kernels of a pass are called at once, and several steps choose their tokens there.

It owns the program of a pass, which is recorded in `CompiledLayers`' order. Passes that a program cannot make, such as
those of other caches, are made call by call.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import TypeGuard

import torch

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.compiled_layers import CompiledLayers
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.taps import Taps
from paceline.engine.native import (
    Kernels,
    PackedWeight,
    PassRows,
    Program,
    RowInputs,
    check_positions,
    row_places,
)
from paceline.engine.native.structures import StepCall
from paceline.engine.row_choice import up_to_none
from paceline.types import ChoiceRule

CAPACITY_STEP = 32
"""Passes are recorded for multiples of so many tokens, so that slowly growing ones are not recorded each time."""


def can_record(kernels: object, plain: PlainDecoder) -> TypeGuard[Kernels]:
    """Return whether the kernels can note the passes of a decoder that they can run: whether nothing else is called."""
    products = [one for layer in plain.layers for one in layer.products]
    is_packed = all(isinstance(one, PackedWeight) and one.dtype == plain.dtype for one in (*products, plain.head))
    is_whole = all(isinstance(one, PackedWeight) and one.padded_count == one.column_count for one in products)
    return isinstance(kernels, Kernels) and is_packed and is_whole


class NativeDecoder(CompiledDecoder):
    def __init__(self, plain: PlainDecoder, kernels: Kernels) -> None:
        """The kernels can note the decoder's passes: see `can_record`."""
        super().__init__(plain, kernels)
        self._native = kernels
        self._passes = _Passes(plain, kernels)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        if not self.can_read(attention):
            return super().logits(token_ids, positions, wanted, attention)
        begun = self._passes.begun(token_ids[0], wanted, attention, self._rows(attention, 0))
        return begun.logits(token_ids.shape[1], len(wanted))

    def logits_and_features(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: Attention,
        taps: Taps | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.can_read(attention):
            return super().logits_and_features(token_ids, positions, wanted, attention, taps)
        tapped = None if taps is None else taps.layers
        begun = self._passes.begun(token_ids[0], wanted, attention, self._rows(attention, 0), tapped)
        token_count = token_ids.shape[1]
        logits = begun.logits(token_count, len(wanted))
        return logits, begun.features(len(wanted) if taps is None else token_count)

    def can_read(self, attention: Attention) -> TypeGuard[PagedAttention]:
        """Return whether programs can be recorded over this attention's memory."""
        return isinstance(attention, PagedAttention) and attention.memory(0)[0].dtype == self.plain.dtype

    def steps(
        self, token_ids: torch.Tensor, attention: PagedAttention, rules: Sequence[ChoiceRule], counts: Sequence[int]
    ) -> list[list[int]]:
        """Choose `counts` tokens after each row of `token_ids` [T], each fed back before the next; see `choices.h`.

        The first rows want the most. `is_plain` holds of the rules. Return the choices, fewer where one cannot be made.
        The cache has room for all but the last.
        """
        rows = self._rows(attention, counts[0] - 1)
        wanted = torch.tensor([span.stop - 1 for span in attention.spans])
        begun = self._passes.begun(token_ids, wanted, attention, rows)
        chosen = torch.empty((counts[0], len(counts)), dtype=torch.int64)
        inputs = RowInputs(rules, [span.length for span in attention.spans])
        logits = begun.new_logits(len(counts))
        for step in range(counts[0]):
            active = sum(count > step for count in counts)
            begun.step(active if step else len(token_ids), logits[:active], inputs, chosen[step])
        return [up_to_none(column[:count]) for column, count in zip(chosen.T.tolist(), counts, strict=True)]

    def _rows(self, attention: PagedAttention, later_count: int) -> PassRows:
        rows = self._native.rows_of(attention, later_count)
        assert rows
        check_positions(rows, len(self.plain.turns.cos))
        return rows

    @property
    def kernels(self) -> str:
        # Calls that are made at once give the same as calls that are made one by one.
        return f"{CompiledDecoder.__name__} {self.plain.way}, {self._kernels.name}"


class _Passes(threading.local):
    """The program of passes of each thread, as memory for passes is each thread's own."""

    def __init__(self, plain: PlainDecoder, kernels: Kernels) -> None:
        self._plain = plain
        self._kernels = kernels
        self._layers = CompiledLayers(plain.layers, plain.turns, kernels)
        self._recorded: _Recorded | None = None

    def begun(
        self,
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        attention: PagedAttention,
        rows: PassRows,
        tapped: tuple[int, ...] | None = None,
    ) -> "_Recorded":
        """Return the program with a pass's numbers filled in. `tapped` are the layers of `_Recorded`."""
        recorded, memory = self._recorded, _memory_of(attention)
        is_same = recorded is not None and (recorded.memory, recorded.tapped) == (memory, tapped)
        if recorded is None or recorded.capacity < len(token_ids) or not is_same:
            capacity = -(-len(token_ids) // CAPACITY_STEP) * CAPACITY_STEP
            if recorded and is_same:
                capacity = max(capacity, recorded.capacity)
            recorded = _Recorded(self._plain, self._layers, self._kernels, attention, rows, capacity, tapped)
            self._recorded = recorded
        recorded.fill(token_ids, wanted, rows)
        return recorded


class _Recorded:
    def __init__(
        self,
        plain: PlainDecoder,
        layers: CompiledLayers,
        kernels: Kernels,
        attention: PagedAttention,
        rows: PassRows,
        capacity: int,
        tapped: tuple[int, ...] | None,
    ) -> None:
        """Record passes of at most `capacity` tokens over the memory of this attention.

        Features are those of the wanted tokens alone, or those of all with what goes into the layers `tapped`.
        """
        head = plain.head
        assert isinstance(head, PackedWeight)
        self.capacity, self.memory, self.tapped = capacity, _memory_of(attention), tapped
        self._kernels, self._head = kernels, head
        self._token_ids, self._wanted = (torch.zeros(capacity, dtype=torch.int64) for _ in range(2))
        self._order = torch.arange(capacity)
        self._rows = rows
        self._taps = Taps(tapped or (), lambda hidden: kernels.take(hidden, self._order))
        with kernels.recording(self._wanted) as recording:
            hidden = kernels.take(plain.embedding, self._token_ids, dtype=torch.float32)
            early = self._wanted if tapped is None else None
            hidden, added = layers.through(hidden, early, attention, rows, self._taps)
            normed = layers.add_and_norm(hidden, added, plain.norm)
            if tapped is not None:
                normed = kernels.take(normed, self._wanted)
            # Each pass has logits of its own, which the caller keeps.
            head.padded(normed, lambda shape, dtype: torch.empty(0))
        self._hidden = hidden
        self._program, self._last, self._read = Program(recording), recording.last, rows.call

    def fill(self, token_ids: torch.Tensor, wanted: torch.Tensor, rows: PassRows) -> None:
        self._token_ids[: len(token_ids)] = token_ids
        self._wanted[: len(wanted)] = wanted
        self._rows = rows
        if rows.call is not self._read:
            ctypes.memmove(ctypes.byref(self._read), ctypes.byref(rows.call), ctypes.sizeof(rows.call))

    def new_logits(self, wanted_count: int) -> torch.Tensor:
        """Return memory for logits, [W, V or a little more]."""
        return torch.empty((wanted_count, self._head.padded_count))

    def logits(self, token_count: int, wanted_count: int) -> torch.Tensor:
        """Make a pass; return its logits [W, V], without the columns that mean nothing."""
        logits = self.new_logits(wanted_count)
        self.run(token_count, logits)
        return logits[:, : self._head.column_count].contiguous()

    def features(self, count: int) -> torch.Tensor:
        """Return the first features of the last pass, in memory that the next one overwrites."""
        return self._taps.beside(self._hidden[:count])

    def run(self, token_count: int, logits: torch.Tensor) -> None:
        """Make a pass that fills in `logits`."""
        self._last.out = logits.data_ptr()
        self._kernels.replay(self._program, token_count, len(logits), self._rows.thread_count)

    def step(self, token_count: int, logits: torch.Tensor, inputs: RowInputs, chosen: torch.Tensor) -> None:
        """Make a pass of the first rows, write a token for each to `chosen`, and make these tokens the next pass.

        `logits` has room for one choice of each.
        """
        read, row_count, logits_rows = self._read, len(logits), row_places([logits])
        read.row_count = row_count
        self.run(token_count, logits)
        choose = inputs.call(row_count, self._head.column_count, logits_rows, chosen)
        positions = inputs.positions.buffer_info()[0]
        self._kernels.step(StepCall(choose, read.rows, self._token_ids.data_ptr(), positions))
        self._wanted[:row_count] = self._order[:row_count]


def _memory_of(attention: PagedAttention) -> tuple[int, torch.Size]:
    """Return where keys and values lie, and how: of the same place and shape a program reads the same."""
    keys, _ = attention.memory(0)
    return keys.data_ptr(), keys.shape
