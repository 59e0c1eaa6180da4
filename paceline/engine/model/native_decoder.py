"""A compiled decoder on a CPU: all kernels of a pass are called at once, and several steps choose their tokens there.

It owns the program of a pass, which is recorded in `CompiledLayers`' order. Passes that a program cannot make, such as
those of other caches, are made call by call.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.interfaces import Attention
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.compiled_layers import CompiledLayers
from paceline.engine.model.plain_decoder import PlainDecoder
from paceline.engine.model.programs import LogitsPass, Programs, can_read, can_record, rows_of
from paceline.engine.model.taps import Taps
from paceline.engine.native import Kernels, PackedWeight, PassRows, RowInputs
from paceline.engine.row_choice import RankedToken
from paceline.types import ChoiceRule

Tapped = tuple[int, ...] | None
"""Layers of which what goes in is a feature, for all tokens; None: features are of the wanted tokens alone."""


def can_record_decoder(kernels: object, plain: PlainDecoder) -> TypeGuard[Kernels]:
    """Return whether the kernels can note the passes of a decoder that they can run."""
    has_head = isinstance(plain.head, PackedWeight) and plain.head.dtype == plain.dtype
    return has_head and can_record(kernels, plain.layers)


class NativeDecoder(CompiledDecoder):
    def __init__(self, plain: PlainDecoder, kernels: Kernels) -> None:
        """The kernels can note the decoder's passes: see `can_record_decoder`."""
        super().__init__(plain, kernels)
        self._native = kernels
        layers = CompiledLayers(plain.layers, plain.rotary, kernels)
        self._programs = Programs(partial(_Recorded, plain, layers, kernels))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        if not self.can_read(attention):
            return super().logits(token_ids, positions, wanted, attention)
        return self._begun(token_ids[0], wanted, attention).logits(token_ids.shape[1], len(wanted))

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
        token_count = token_ids.shape[1]
        begun = self._begun(token_ids[0], wanted, attention, tapped=taps.layers if taps else None)
        logits = begun.logits(token_count, len(wanted))
        return logits, begun.features(token_count if taps else len(wanted))

    def can_read(self, attention: Attention) -> TypeGuard[PagedAttention]:
        """Return whether programs can be recorded over this attention's memory."""
        return can_read(attention, self.plain.dtype)

    def steps(
        self, token_ids: torch.Tensor, attention: PagedAttention, rules: Sequence[ChoiceRule], counts: Sequence[int]
    ) -> list[list[int]]:
        """Choose `counts` tokens after each row of `token_ids` [T], each fed back before the next; see `choices.h`.

        The first rows want the most. `is_plain` holds of the rules. Return the choices, fewer where one cannot be made.
        The cache has room for all but the last.
        """
        begun = self._begun_steps(token_ids, attention, counts)
        return begun.steps(len(token_ids), counts, _inputs(rules, attention))

    def ranked_steps(
        self,
        token_ids: torch.Tensor,
        attention: PagedAttention,
        rules: Sequence[ChoiceRule],
        counts: Sequence[int],
        ranked_count: int,
    ) -> list[list[list[RankedToken]]]:
        """Make steps as `steps` does; return the likeliest tokens at each place, the choice first."""
        begun = self._begun_steps(token_ids, attention, counts)
        return begun.ranked_steps(len(token_ids), counts, _inputs(rules, attention), ranked_count)

    def _begun_steps(self, token_ids: torch.Tensor, attention: PagedAttention, counts: Sequence[int]) -> "_Recorded":
        wanted = torch.tensor([span.stop - 1 for span in attention.spans])
        return self._begun(token_ids, wanted, attention, [count - 1 for count in counts])

    def _begun(
        self,
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        attention: PagedAttention,
        later_counts: Sequence[int] = (),
        tapped: Tapped = None,
    ) -> "_Recorded":
        """Return the program of a pass, all but run. Sequences may grow by `later_counts` tokens in it."""
        rows = rows_of(self._native, attention, len(self.plain.rotary.cos), wanted, later_counts)
        begun = self._programs.begun(len(token_ids), wanted, attention, rows, tapped)
        begun.token_ids[: len(token_ids)] = token_ids
        return begun

    @property
    def kernels(self) -> str:
        # Calls that are made at once give the same as calls that are made one by one.
        return f"{CompiledDecoder.__name__} {self.plain.way}, {self._kernels.name}"


def _inputs(rules: Sequence[ChoiceRule], attention: PagedAttention) -> RowInputs:
    return RowInputs(rules, [span.length for span in attention.spans])


class _Recorded(LogitsPass):
    def __init__(
        self,
        plain: PlainDecoder,
        layers: CompiledLayers,
        kernels: Kernels,
        attention: PagedAttention,
        rows: PassRows,
        capacity: int,
        tapped: Tapped,
    ) -> None:
        assert isinstance(plain.head, PackedWeight)
        super().__init__(plain.head, kernels, attention, rows, capacity)
        self._taps = Taps(tapped or (), lambda hidden: kernels.copied(hidden, hidden.dtype))
        with self.recording():
            hidden = kernels.take(plain.embedding, self.token_ids, dtype=torch.float32)
            early = self.wanted if tapped is None else None
            self._hidden, added = layers.through(hidden, early, attention, rows, self._taps)
            normed = layers.add_and_norm(self._hidden, added, plain.norm)
            if tapped is not None:
                normed = kernels.take(normed, self.wanted)
            self.record_logits(normed)

    def features(self, count: int) -> torch.Tensor:
        """Return the first features of the last pass, in memory that the next one overwrites."""
        return self._taps.beside(self._hidden[:count])
