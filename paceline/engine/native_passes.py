"""Passes on a CPU by a native decoder: one pass over rows, or several steps of them without bookkeeping in between."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from paceline.checks import DECODED_TOKENS
from paceline.engine.attention.paged import PagedAttention
from paceline.engine.cache.paged import KvPool
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.native_decoder import NativeDecoder
from paceline.engine.passes import FastPasses, Piece, packed, threads_of
from paceline.engine.row_choice import RankedToken, is_plain
from paceline.types import ChoiceRule

Made = TypeVar("Made")


class NativePasses(FastPasses):
    def __init__(self, model: LoadedModel, cache: KvPool) -> None:
        """The model's decoder must be a `NativeDecoder`."""
        super().__init__(model, cache)
        assert isinstance(model.decoder, NativeDecoder)
        self._decoder = model.decoder

    def can_step(self, token_count: int, rule: ChoiceRule) -> bool:
        return token_count <= DECODED_TOKENS and is_plain(rule)

    def most_rows(self, token_count: int) -> int:
        return sys.maxsize

    def steps(self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int]) -> list[list[int]]:
        return self._in_order(pieces, rules, counts, self._decoder.steps)

    def ranked_steps(
        self, pieces: Sequence[Piece], rules: Sequence[ChoiceRule], counts: Sequence[int], ranked_count: int
    ) -> list[list[list[RankedToken]]]:
        return self._in_order(pieces, rules, counts, partial(self._decoder.ranked_steps, ranked_count=ranked_count))

    @torch.inference_mode()
    def _in_order(
        self,
        pieces: Sequence[Piece],
        rules: Sequence[ChoiceRule],
        counts: Sequence[int],
        make: Callable[[torch.Tensor, PagedAttention, Sequence[ChoiceRule], Sequence[int]], list[Made]],
    ) -> list[Made]:
        """Have steps made with the rows first that want the most: those that have all leave from the end."""
        order = sorted(range(len(pieces)), key=lambda index: -counts[index])
        token_ids, spans = packed([pieces[index] for index in order])
        attention = self._cache.attention(spans)
        assert self._decoder.can_read(attention)
        with threads_of(self._model, len(token_ids)):
            ordered = [rules[index] for index in order], [counts[index] for index in order]
            made = dict(zip(order, make(torch.tensor(token_ids), attention, *ordered), strict=True))
        return [made[index] for index in range(len(pieces))]
